"""Placements run and compared.

``trials``: placements run for real, kept in a file; ``measured_search``: the fastest of few such
runs; ``compare``: planners beside each other, a ``row`` each; ``ways``: a plan, one device and
plain PyTorch timed in turns; ``tracking``: mirrors of a run's folder.
"""
