"""What the executor does on a real GPU beside CPU cores: checked, then measured, in eight minutes.

    python -m experiments.gpu --out FOLDER [--more] [--emulated] [--sections NAME ...]

With ``--more`` it is what came later, in eight minutes again, to a folder of its own: compiled runs
beside ``torch.compile``, models that stream with four budgets, pieces of a matrix, and runs that
decide. ``--seconds``: of all sections, else 470.

Each section is a process of its own with a deadline: what stops one costs no other. Every figure
is a line of ``FOLDER/gpu.jsonl``, written at once; ``FOLDER/profiles.zip`` has the profiles, and
with their graphs as problem files, which ``experiments.gpu_results`` takes; ``FOLDER/traces.txt``
where a section was when it failed or was stopped. The table comes last, and is ``FOLDER/gpu.md``
too. ``--emulated`` runs the code of both on tiny models on the emulated GPU of the tests: it shows
nothing but that the script runs to its end.
``experiments/gpu.sh`` builds what a bare machine needs.

Files: ``processes`` starts the sections, ``bench`` is what each works with. Sections are in
``checks``, ``predictions``, ``plans``, ``memory``, ``pieces``, ``learning`` and ``training``, on
what is in ``models``.
"""
