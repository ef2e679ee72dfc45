"""Pages and tables that show runs, made from the files of their folders alone: `RUN/report.html`, and a comparison.

`run_record` reads a folder, `charts` draws curves, `html_page` frames a page; `report` has the page of one run,
`comparison` the page of several. Nothing here imports Paddle, or runs code that a recipe names. Everything
that a file contains is escaped.
"""
