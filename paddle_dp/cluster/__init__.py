"""Files with which a cluster's engine runs a recipe: a script for Slurm, manifests for Kubernetes, JobSet and Volcano.

Nothing is submitted: `paddle-dp cluster` prints the text, which is read, changed and kept by a person.
"""
