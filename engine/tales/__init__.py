"""The demo's trained model: the text that it learns, the script that trains it, and what comes of it in `model/`.

No process of a cluster imports this: `engine/demo_model.py` copies the files.
"""
