"""An operator graph and its program, built operator by operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from placement.capturing.exported import named_leaves
from placement.graph import OpGraph
from placement.program import Param, Program, Ref, Step, leaves_of


class Builder:
    """Numbers operators, tensors and parameters; the lists are those of ``OpGraph.build``."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.params: list[Tensor] = []
        self.param_names: list[str] = []
        self.op_name: list[str] = []
        self.op_kind: list[str] = []
        self.op_module: list[str] = []
        self.op_signature: list[str] = []
        self.is_backward: list[bool] = []
        self.group: list[int] = []
        self.tensor_src: list[int] = []
        self.tensor_bytes: list[int] = []
        self.tensor_root: list[int] = []
        self.uses: list[tuple[int, int]] = []
        self.param_uses: list[tuple[int, int]] = []

    def add_tensor(self, src: int, node: fx.Node, root: int | None = None) -> int:
        """Number what ``node`` gives and operator ``src`` makes, in the memory of ``root``."""
        value = node.meta["val"]
        self.tensor_src.append(src)
        self.tensor_bytes.append(int(value.numel() * value.element_size()))
        self.tensor_root.append(len(self.tensor_root) if root is None else root)
        return len(self.tensor_root) - 1

    def add_step(self, step: Step, name: str, kind: str, module: str, signature: str) -> None:
        """Number an operator, and note what it reads."""
        n = len(self.steps)
        self.steps.append(step)
        for leaf in leaves_of((step.args, step.kwargs)):
            if isinstance(leaf, Ref):
                self.uses.append((leaf.tensor, n))
            elif isinstance(leaf, Param):
                self.param_uses.append((n, leaf.index))
        self.op_name.append(name)
        self.op_kind.append(kind)
        self.op_module.append(module)
        self.op_signature.append(signature)

    def graph(
        self,
        name: str,
        values: list[Any],
        input_names: tuple[str, ...],
        *,
        keepers: Sequence[tuple[int, int]] = (),
        **facts: Any,
    ) -> OpGraph:
        """The graph for inputs ``values``; ``facts`` are what else its ``Program`` has.

        ``keepers`` are operators, and bytes that they keep beside the parameters.
        """
        leaf_names, example_leaves, in_tree = named_leaves(values, input_names)
        program = Program(
            steps=tuple(self.steps),
            params=tuple(self.params),
            param_names=tuple(self.param_names),
            input_names=input_names,
            leaf_names=leaf_names,
            example_leaves=example_leaves,
            in_tree=in_tree,
            **facts,
        )
        sizes = [p.numel() * p.element_size() for p in self.params]
        more = [(op, len(sizes) + i) for i, (op, _) in enumerate(keepers)]
        return OpGraph.build(
            name,
            self.op_name,
            self.tensor_src,
            self.tensor_bytes,
            self.uses,
            op_kind=self.op_kind,
            op_module=self.op_module,
            op_signature=self.op_signature,
            tensor_root=self.tensor_root,
            param_bytes=[*sizes, *(size for _, size in keepers)],
            param_uses=[*self.param_uses, *more],
            group=self.group,
            is_backward=self.is_backward or None,
            output_tensor=sorted({x.tensor for x in program.output_leaves if isinstance(x, Ref)}),
            program=program,
        )
