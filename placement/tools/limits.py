"""What is read and computed with at most: beyond it, files and arguments are refused in a line."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """Of what others write: more would fill the memory, leave int64, or never end."""

    # Files.
    file_bytes: int = 2**31  # read whole: as much as protobuf, and so ONNX, allows
    plan_bytes: int = 2**28
    config_bytes: int = 2**24  # of a file that may be a model's config.json
    unpacked_bytes: int = 2**30  # of a compressed file's content
    unpacked_times: int = 50  # ... beside 16 MiB, over the file's own: no text compresses to less
    packed_times: int = 200  # beside 64 MiB, the bytes of arrays over those of their archive
    depth: int = 100  # of lists and objects in each other: Python's own recursion allows far more
    digits: int = 308  # of a number that float64 holds
    aliases: int = 100_000  # values that a short text of YAML may repeat

    # Graphs, clusters and problems.
    graph_bytes: int = 2**53  # so that no sum over copies and micro-batches leaves int64
    devices: int = 4096  # of a cluster: a table of all pairs of them, of float64, is 128 MiB then
    threads: int = 2**16  # of a device; the number of a core is below it
    # That anything may take, sending a byte included: 30,000 years. Sums over operators, or over
    # all the bytes of a graph, stay below what planners take for infeasible (1e30).
    seconds: float = 1e12
    runs: int = 2**24  # operators x micro-batches: a timetable of them has half a GiB
    phases: int = 1024  # of a periodic placement
    waiting: int = 2**36  # micro-batches x those in flight: the simulator looks at all that wait
    times: int = 2**23  # in a file: of tensors between devices, or of operators on them
    joined: int = 512  # devices of a file whose every pair is a link of its own

    nodes: int = 2**20  # of an ONNX model, once what its functions call is in their places

    # Language models.
    layers: int = 4096  # and other parts of which each is an object
    run_layers: int = 1024  # of a config.json: a token runs through each unlike one, 3 ms
    experts: int = 4096  # of a layer
    elements: int = 2**40  # of a tensor
    model_bytes: int = 2**55  # of weights and cache
    quantized: int = 2**24  # numbers that share a scale
    tensors: int = 2**20  # of a GGUF file, and as many keys
    text_bytes: int = 2**24  # of a text in it
    items: int = 2**24  # of a list in it
    read_items: int = 2**16  # ... of which more are not read: no list that matters is as long

    # Blocks to be scheduled: sums over many micro-batches must fit int64 too.
    blocks: int = 4096
    block_entries: int = 2**17  # predecessors of all blocks, and devices
    block_runs: int = 2**20  # blocks x micro-batches of a schedule
    block_total: int = 2**36  # time, or memory, of all blocks


MOST = Limits()
