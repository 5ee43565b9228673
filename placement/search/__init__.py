"""What planners, environments and policies share.

``planner``: how one is found, and what it may spend; ``evaluation``: scoring choices within that,
symmetry, moves, what cannot fit; ``stages``: cutting an order into stages; ``coarsen``: smaller
problems; ``grid``: recurrent models; ``windows``: pieces of an order, solved exactly. Kernels:
``macro`` (moves of placements), ``order`` (of orders too, with what it is given, times, estimates
and moves in files of their own), ``perceptron`` (which of the moves that are offered),
``list_kernels`` with ``list_schedule``, ``ideal_kernels``.
"""
