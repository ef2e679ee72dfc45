"""Judges: one file per subject, each a function from the recorded events to a ReportSection with findings.

Nothing here runs a script or imports paddle.
"""
