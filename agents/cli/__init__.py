"""The commands ``placement-compare``, ``placement-train`` and ``placement-sweep-report``."""
