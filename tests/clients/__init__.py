"""Clients that people use, as their packages are, against a cluster: `make test-clients`.

Each package has an environment of its own and one script, `with_NAME.py`, that runs in it. A script knows nothing of
Baton but what `cases.py` says: where the cluster is, and what its model answers.
"""
