"""What operators and links cost: measured, calibrated, predicted.

``measure``: every operator on every device, in the middle of its model; ``measure_within``: the
ones that matter, within some seconds; ``links``: between processes and machines; ``power``:
watts. ``corpus`` keeps all that was ever measured, ``features`` describes an operator without
running it, ``table`` joins both for ``predictors``.
"""
