"""The search for schedules that repeat, by CP-SAT (Lin et al., "Tessel", TPDS 2024).

``blocks``: one micro-batch as blocks on devices; ``repetend``: the pattern that repeats;
``packing``: patterns where there are too many blocks for CP-SAT, and where it begins;
``retime``: from a pattern to a schedule of N micro-batches; ``order_kernels``: its inner loops;
``search``: all of it within a budget.
"""
