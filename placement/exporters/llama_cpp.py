"""llama.cpp: the device of each layer, and the buffer type of each tensor."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from placement.exporters import Exported, ExportError
from placement.exporters._modules import (
    Forward,
    decoder_units,
    layer_units,
    majority,
    served_format,
)
from placement.plan import Plan
from placement.problem import Problem

_PREFIX = {"cuda": "CUDA", "rocm": "ROCm", "metal": "MTL", "vulkan": "Vulkan"}
_ENDPOINT = re.compile(r"[\w.-]{1,200}:[0-9]{1,5}", re.ASCII)
_WHOLE = "a layer is whole, and llama.cpp has one CPU device"
_TIED = "the head is the embedding's tensor, and a rule for token_embd.weight moves both"
_APART = {"experts": r"ffn_.*_exps", "feed_forward": "ffn_"}  # tensors of an operator of its own


@dataclass(frozen=True)
class LlamaCpp:
    r"""Argument of ``-ot`` (``--override-tensor``): ``blk\.(0|1)\.=CUDA0,blk\.2\.=CPU,...``.

    Format: ``parse_tensor_buffer_overrides`` in ``common/arg.cpp`` (ggml-org/llama.cpp#11397):
    ``<regex>=<buffer type>`` joined by commas, the first match wins. Names of tensors are those
    of GGUF (``gguf-py/gguf/constants.py``): ``token_embd``, ``blk.N.``, ``output``. Every layer
    is whole, unless the plan is of a language model without its weights: there experts (or a
    feed-forward) may be apart. What is neither before nor in the layers is ``output``.

    The options beside it are written too (``.args``): ``-ngl`` layers on accelerators, ``-dev``
    and ``-ts`` their order and how many each has, which also says where keys and values are
    (``get_layer_buft_list`` in ``src/llama-model.cpp``), and ``--rpc``. Where weights are left to
    the processor, ``.env`` has the tokens from which on they are copied to a GPU and computed there
    (``ggml_backend_cuda_device_offload_op`` in ``ggml/src/ggml-cuda/ggml-cuda.cu``).

    A tied head is made from ``token_embd.weight`` and matched by that name (``create_tensor`` in
    ``src/llama-model-loader.cpp``, ``TENSOR_DUPLICATED``), so that a rule moves both. Without one
    the embedding is on the CPU, and the head where the options say: a plan has both on one device,
    or the embedding on the CPU.

    Attributes:
        layers: path of the list of layers; None finds it.
        rpc: servers of other hosts: ``node1=192.168.0.5:50052`` for devices called
            ``node1/cuda:0``, joined by commas.
    """

    layers: str | None = None
    rpc: tuple[str, ...] = ()

    def __call__(self, plan: Plan, problem: Problem | None = None) -> Exported:
        kinds = {d.name: d.kind for d in plan.cluster.devices}
        used = set(plan.assignment.values())
        backends = Backends(plan, self.rpc)
        for name in sorted(used):
            backends.buffer(name)
        forward = Forward.of(plan, problem)
        _, unit, num_layers = decoder_units(forward, self.layers, "llama.cpp")
        tied = forward.tied(unit) and num_layers + 1 in unit
        unit = forward.joined(unit)
        host = sorted(name for name in used if kinds[name] == "cpu")
        apart: list[str | None] = [None] * len(unit)
        if served_format(plan) is not None:
            # Hot experts and the others of a layer are one tensor.
            last_words = (name.rpartition(".")[2].partition("#")[0] for name in forward.name)
            apart = [word if word in _APART else None for word in last_words]
        # A part of a layer that is apart is a unit of its own, behind the others.
        key = list(zip(unit, apart, strict=True))
        on = majority(key, [host[0] if name in host else name for name in forward.device])
        why, embedding, head = _WHOLE, (0, None), (num_layers + 1, None)
        number = {k: i for i, k in enumerate(on)}
        fixed = {}
        if tied and on[embedding] in host:
            fixed = {number[embedding]: on[embedding]}
        elif tied:
            why = _TIED if on[embedding] != on[head] else _WHOLE
            on[embedding], number[embedding] = on[head], number[head]
        whole = [on[k] for k in key]
        if whole != list(forward.device):
            placed = {number[k]: device for k, device in on.items()}
            few = used - set(host[1:])
            whole = forward.nearest([number[k] for k in key], placed, few, fixed)
        forward.require(whole, "-ot", why)
        last = on.get(head, on[num_layers, None])
        if tied and on[embedding] in host and last not in host:
            del on[embedding]  # a rule would take the head along
        rules = _rules(on, num_layers, backends)
        files = {"": ",".join(rules) + "\n"}
        layer = [on[u, None] for u in range(1, num_layers + 1)]
        others = sorted(set(on.values()) - set(host))
        # A head on the CPU is there by its rule, and no reason to leave a layer's cache there too.
        output = layer[-1] if last in host else last
        files[".args"], missing = _arguments(layer, output, host, others, backends)
        note = 'llama-server -m MODEL $(cat FILE.args) -ot "$(cat FILE)"'
        least = plan.provenance.profile.get("offload_min_batch")
        if isinstance(least, int) and host and others:
            files[".env"] = f"GGML_OP_OFFLOAD_MIN_BATCH={least}\n"
            note = f"env $(cat FILE.env) {note}"
        note += missing + _as_ncmoe(on, num_layers, host)
        if tied:
            note += f"; the tied head is on {backends.buffer(last)}"
        return Exported(files, note, _bench(plan, rules, files))


def _as_ncmoe(on: dict[tuple[int, str | None], str], num_layers: int, host: list[str]) -> str:
    """What says the same where only experts of the first layers are on the processor."""
    left = sorted(u for (u, apart), d in on.items() if apart == "experts" and d in host)
    routed = sorted(u for u, apart in on if apart == "experts")
    layers = {d for (u, apart), d in on.items() if apart != "experts" and 1 <= u <= num_layers}
    if not left or left != routed[: len(left)] or layers & set(host):
        return ""
    return f"; -ncmoe {left[-1]} in place of -ot says the same of the experts"


def _bench(plan: Plan, rules: list[str], files: dict[str, str]) -> str:
    """What measures the plan: ``tools/llama-bench/README.md``, ``tools/batched-bench``."""
    asked = plan.provenance.profile
    context, batch, prompt = (asked.get(name) for name in ("context", "batch", "prompt"))
    if not (isinstance(context, int) and isinstance(batch, int) and isinstance(prompt, int)):
        return ""
    env = f"{files['.env'].strip()} " if ".env" in files else ""
    options = files[".args"].strip()
    answer = min(32, context // 2)  # tokens: enough, at nearly the whole context
    if batch > 1:
        sizes = f"-c {context * batch} -npp {context - answer} -ntg {answer} -npl {batch}"
        return f"{env}llama-batched-bench -m MODEL {options} -ot '{','.join(rules)}' {sizes}"
    words = options.replace("--rpc", "-rpc").split()
    at = [i + 1 for i, word in enumerate(words) if word in ("-dev", "-ts")]
    words = [w.replace(",", "/") if i in at else w for i, w in enumerate(words)]
    size = {
        "prefill": f"-p {prompt} -n 0",
        "serve": f"-p 0 -n 0 -pg {prompt},{context - prompt}",
    }.get(str(asked.get("objective")), f"-p 0 -n {answer} -d {context - answer}")
    return f"{env}llama-bench -m MODEL {' '.join(words)} -ot '{';'.join(rules)}' {size}"


def layers_of(plan: Plan) -> tuple[dict[str, int], int, bool]:
    """``(operator -> 0 of what runs before the layers, layer + 1, or L + 1 behind; L; tied)``.

    ``tied``: the head, which is the last operator, has the embedding's tensor.

    Raises:
        ExportError: the plan does not know modules, or has no layers.
    """
    forward = Forward.of(plan)
    _, unit, num_layers = layer_units(forward, None)
    tied = forward.tied(unit)
    return dict(zip(forward.name, forward.joined(unit), strict=True)), num_layers, tied


class Backends:
    """What llama.cpp calls the devices of a plan.

    ``rpc`` names servers, see ``LlamaCpp``.

    Raises:
        ExportError: a server that is not given as NODE=HOST:PORT.
    """

    def __init__(self, plan: Plan, rpc: Sequence[str]) -> None:
        self.kinds = {d.name: d.kind for d in plan.cluster.devices}
        self.endpoints: dict[str, str] = {}
        for text in rpc:
            node, _, endpoint = text.partition("=")
            if not node or not _ENDPOINT.fullmatch(endpoint):
                raise ExportError(
                    f"rpc = {text[:60]!r}: give NODE=HOST:PORT, e.g. node1=10.0.0.2:50052"
                )
            self.endpoints[node] = endpoint
        # Devices of servers are numbered through, server by server.
        self.remote = [
            d.name
            for node in self.endpoints
            for d in plan.cluster.devices
            if d.name.startswith(f"{node}/")
        ]

    def buffer(self, device: str) -> str:
        """Its buffer type.

        Raises:
            ExportError: none is known.
        """
        return self.names(device)[1]

    def names(self, device: str) -> tuple[str, str]:
        """The device as ``-dev`` has it, and its buffer type."""
        kind = self.kinds[device]
        if kind == "cpu" and device not in self.remote:
            return "none", "CPU"
        if device in self.remote:
            node = device.partition("/")[0]
            own = [x for x in self.remote if x.startswith(f"{node}/")].index(device)
            return f"RPC{self.remote.index(device)}", f"RPC{own}[{self.endpoints[node]}]"
        match = re.fullmatch(rf"{re.escape(kind)}:([0-9]{{1,4}})", device)
        if kind in _PREFIX and match:
            return f"{_PREFIX[kind]}{match[1]}", f"{_PREFIX[kind]}{match[1]}"
        raise ExportError(
            f"no buffer type of llama.cpp is known for {device[:60]!r}: devices are CPU cores "
            "(kind cpu) or GPUs (kind cuda) called cuda:0, cuda:1, ... (likewise rocm, metal, "
            "vulkan), or those of a server, rpc=NODE=HOST:PORT"
        )


def _rules(on: dict[tuple[int, str | None], str], num_layers: int, backends: Backends) -> list[str]:
    """The rules, those of tensors that are apart from their layer first."""
    rules: dict[tuple[str | None, str], list[int]] = {}
    for (u, apart), device in on.items():
        if apart is None or on.get((u, None)) != device:
            rules.setdefault((apart, backends.buffer(device)), []).append(u)
    text = []
    for (apart, buffer), units in sorted(rules.items(), key=lambda x: x[0][0] is None):
        numbers = [str(u - 1) for u in units if 1 <= u <= num_layers]
        if numbers:
            text.append(rf"^blk\.({'|'.join(numbers)})\.{_APART.get(apart or '', '')}={buffer}")
        if 0 in units:
            text.append(f"^token_embd={buffer}")
        if num_layers + 1 in units:
            text.append(f"^output={buffer}")
    return text


def _arguments(
    layer: list[str], head: str, host: list[str], others: list[str], backends: Backends
) -> tuple[str, str]:
    """The options, and what they cannot say."""
    runs = [(device, len(list(group))) for device, group in groupby([*layer, head])]
    first = runs[0][1] if runs[0][0] in host else 0
    on_gpus = runs[1:] if first else runs
    devices = [device for device, _ in on_gpus]
    missing = ""
    if len(set(devices)) < len(devices) or set(devices) & set(host):
        missing = (
            "; keys and values of some layers are elsewhere than planned: a device comes twice"
        )
        order = [d for d in dict.fromkeys([*layer, head]) if d not in host]
        order.sort(key=head.__eq__)  # the last one has the output
        on_gpus = [(d, [*layer, head].count(d)) for d in order]
        first = len(layer) + 1 - sum(n for _, n in on_gpus)
    # Whose buffers hold tensors alone gets no layers, but has to be named.
    on_gpus += [(d, 0) for d in others if d not in dict(on_gpus)]
    words = [f"-ngl {len(layer) + 1 - first}"]
    if backends.endpoints:  # first: options are read in order, and -dev names its devices
        words.insert(0, f"--rpc {','.join(backends.endpoints.values())}")
    if on_gpus:
        words.append(f"-dev {','.join(backends.names(d)[0] for d, _ in on_gpus)}")
        words.append(f"-ts {','.join(str(n) for _, n in on_gpus)}")
    return " ".join(words) + "\n", missing
