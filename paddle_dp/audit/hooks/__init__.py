"""What is put around Paddle's classes in a rank before a foreign script starts: data, updates, collectives, seeds.

A hook writes down and passes on. It sends nothing, draws no random number and changes no number of the script's; the
one thing that it does change is how long: passes over data are cut short and the script is ended after enough steps.
Nothing is judged here: that is done afterwards, outside, by the package's other files.
"""
