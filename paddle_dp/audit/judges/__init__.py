"""What the ranks wrote down, judged: one file per subject, each a function of the records to a Section.

Nothing runs here and nothing imports paddle: events and arrays go in, sentences with numbers come out. How they were
recorded is the hooks' business, how they are shown the report's.
"""
