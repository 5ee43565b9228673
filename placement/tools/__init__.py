"""What knows nothing of placements.

``files``: strict reading, atomic writing; ``named``: what is found by the name of its file;
``shown``: notebooks; ``parallel``: maps over processes; ``jit``: how kernels are compiled, and
structs for them; ``cpsat``: a solver that Ctrl-C ends; ``ownership``: whether these packages are
ours.
"""
