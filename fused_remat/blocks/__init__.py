"""Block graphs: named activations, what each is rebuilt from, and how backward asks for them.

`encoder.py` declares a block, `nodes.py` holds the steps it is made of, `program.py` works out
what is kept, rebuilt and freed, and `run.py` runs that over groups of sequences, each a frame of
named tensors (`frame.py`).
"""
