"""Every operator of a captured graph, run once in an order that the edges allow."""

import torch

from placement.program import fill


def values_of(graph, inputs, rng=None):
    """Every tensor by number: in the order of the graph, or with ``rng`` in a random one."""
    program = graph.program
    live = dict(zip(program.input_tensors, inputs, strict=True))
    waiting = list(range(graph.num_ops))

    def is_ready(op):
        return all(t in live for t in graph.in_tensor[graph.in_ptr[op] : graph.in_ptr[op + 1]])

    with torch.no_grad():
        while waiting:
            op = waiting[0] if rng is None else int(rng.choice([*filter(is_ready, waiting)]))
            waiting.remove(op)
            step = program.steps[op]
            args, kwargs = (fill(x, live, program.params) for x in (step.args, step.kwargs))
            value = step.target(*args, **kwargs)
            for t, i in zip(step.outputs, step.output_index, strict=True):
                live[t] = value[i] if step.multi else value
    return live
