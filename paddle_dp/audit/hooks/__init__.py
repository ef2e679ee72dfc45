"""Hooks on Paddle's classes, installed in a rank before the script starts: data, updates, collectives, seeds.

A hook records an event and calls the original. It sends nothing, draws no random number and changes no number of the
script. It changes the length only: it cuts passes over data short and ends the script after enough steps.
"""
