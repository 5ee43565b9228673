"""Is the learned planner worth using? One study per file; budgets in ``experiments.budgets``."""
