"""Is the learned planner worth using? One study per file.

Budgets, seeds and problem splits were written down before the runs. An option of the command line
changes one for a trial run; the results then say which, and that it is not what was written down.
Whatever is measured in these studies was not trained on: public files, captured models and the
graphs of ``synthetic`` with a seed of ``problems.HELD_OUT`` or above belong to the studies; the
released policies may train on synthetic graphs of smaller seeds.
"""
