"""Predict the timeline of a placement: one numba kernel, and what it means in plain Python.

**Meaning** (``simulate_reference`` is the executable definition; the kernel equals it).

* A placement int32 ``[N]`` holds for every micro-batch. One int32 ``[K, N]`` is *periodic*: row
  ``m % K``, the *phase*, is that of micro-batch ``m``; so replicas take turns.
* A device is a serial worker. A free device takes, among the (operator, micro-batch) whose
  inputs have arrived, the smallest micro-batch, then the first by ``Problem.priority`` (upward
  rank, unless the profile was measured in another order); with ``ready_order="arrival"`` the
  one whose last input arrived first, then the smallest micro-batch, then the smallest operator;
  with a ``Schedule`` it takes the next entry of its order.
* A tensor is sent once per (micro-batch, destination device). It is queued on the channel of
  its device pair when its producer ends and leaves when the channel is free (without
  ``contention``: at once, however many are under way). Tensors of one
  producer are queued by tensor number, then by first consumer. A blocking link keeps the
  sender's worker busy until its transfer ends. Handing tensors over takes it ``send_s`` and
  ``send_s_per_byte`` each, and ``wake_s`` for each receiver that is idle (runs, sends and awaits
  nothing at that moment) and so must be woken, from the end of the producer on. Taking one in
  makes the operator that reads it there take ``receive_s`` longer; of several the one with the
  smallest number.
* At equal times all ends come first, then admissions, then starts, each in device order.
* At most ``max_in_flight`` micro-batches are between first operator and last; the next is
  admitted when one finishes. A given ``Schedule`` limits itself and all are admitted at 0.
* What is placed on a device that ``streams`` runs on its ``Problem.worker``, which alone counts
  from there on.
* Model inputs are present for every device that shares host memory (kind ``cpu``) at
  admission, and are sent to the others from the first CPU device.
* Besides that operators take ``compute_s + share * (loaded_s - compute_s)``. In a run of one
  micro-batch ``share`` is the share of the other devices that run something when the operator
  begins (or begin at the same moment). In a pipelined run it is how much of the time they are
  busy (their mean load over the largest load, and a load the mean over the phases), and
  operators are stretched alike so that all of a micro-batch together take ``batch_s`` longer.
* In training, what replicas have added up travels after the last operator to the device that
  makes the gradient in phase 0, from each device of other memory (those of kind ``cpu`` share
  one); when all is there, new values travel back. Of that the period has the ``M``-th part.
* Memory: parameters and what libraries keep, plus every tensor from when its producer is taken
  (or its transfer begins) until its last consumer or outgoing transfer on that device ended
  (outputs: until their micro-batch finished), plus the workspace of running operators. Tensors
  that share memory (views) hold it together, once. Model inputs count from their admission on
  every CPU device that uses them. Frees come before allocations at equal times.
"""

# ruff: noqa: F401
from placement.simulator.predictions import (
    Values,
    as_simulated,
    beside,
    durations,
    evaluate,
    list_schedule,
    score,
    simulate,
    value_in,
    value_of,
    worth,
)
from placement.simulator.reference import simulate_reference
