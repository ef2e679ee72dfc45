"""Finds and builds parts: `use: name` → file on a shelf → Config → build().

This package resolves names and checks settings for every shelf. `recipe/` reads a whole recipe, with its lines and
overrides; the shelves' folders hold the parts.
"""

from paddle_dp.part.annotation import Annotation, annotate
from paddle_dp.part.config import settings_of
from paddle_dp.part.groups import Groups, ParameterGroup, adapted, freeze
from paddle_dp.part.part import Part, Readers, Reading, find, lazily, read_part, undisturbed
from paddle_dp.part.settings import ErrorContext, read_settings
from paddle_dp.part.shelf import SHELVES, names, summary

__all__ = [
    "SHELVES", "Annotation", "ErrorContext", "Groups", "ParameterGroup", "Part", "Readers", "Reading", "adapted",
    "annotate", "find", "freeze", "lazily", "names", "read_part", "read_settings", "settings_of", "summary",
    "undisturbed",
]  # fmt: skip
