"""Answers "is it the same training?": of two objects, of the ranks before they begin, of a run and its checkpoint.

Describing objects and naming their changes by training lies below `core`. On it stand the facts of a training
(facts, task_facts, source_code), the comparison of the ranks (consistency), of a resume with its checkpoint (same_run),
and the lines about state that no checkpoint holds (unsaved). The tensors of ranks are compared in `core.consistency`;
verdicts and certificates, which are made of the facts, are in `certificate`, and a callback's names are checked in
train/overrides.
"""
