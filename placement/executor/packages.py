"""A plan as packages of AOTInductor, one a stage, and loaders that pipeline them.

A stage is a run of a device. The folder needs no code of the model, nor of this project: ``run.py``
is the loader in Python, ``pipeline.h`` and ``main.cpp`` the one in C++, by the header that PyTorch
documents (``torch/csrc/inductor/aoti_package/model_package_loader.h``).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch.utils import _pytree as pytree

from placement.cluster import Cluster
from placement.executor import equality, packaged
from placement.executor.compiled import compiling, graph_of, recipe
from placement.executor.share import fused, runs_of, shares
from placement.graph import OpGraph
from placement.program import Ref, dtype_name, run_program
from placement.tools.compiler import missing_compiler
from placement.tools.files import FileError
from placement.tools.progress import Progress


class PackageError(ValueError):
    """The plan cannot be packaged; the message says why."""


def write_packages(
    graph: OpGraph,
    cluster: Cluster,
    placement: ArrayLike,
    priority: ArrayLike,
    folder: str | Path,
    *,
    in_flight: int = 4,
    report: Progress = lambda *_: None,
) -> int:
    """Write the folder, which is not there yet; how many packages it has.

    Args:
        graph: of inference, with its program, whose parameters are part of the packages.
        placement: int ``[N]`` CPU device of each operator.
        priority: int ``[N]`` as ``Runner`` has it.

    Raises:
        PackageError: no compiler, a GPU, outputs that no operator makes, an operator that Inductor
            refuses, or packages that compute something else than the module.
        FileError: the folder is there, or cannot be written.
    """
    folder, program = Path(folder), graph.program
    on = np.asarray(placement)
    if compiler := missing_compiler():
        raise PackageError(f"there is no C++ compiler {compiler!r} here: placement doctor")
    if on.ndim != 1 or any(cluster.devices[d].kind != "cpu" for d in np.unique(on)):
        raise PackageError("only plans of CPU devices, in one phase, become packages")
    if program.gradients or program.new_buffers:
        raise PackageError("training is not packaged: plan inference")
    outputs = [x.tensor if isinstance(x, Ref) else None for x in program.output_leaves]
    if None in outputs:
        raise PackageError("an output is a parameter or a constant, which no stage makes")
    if folder.exists():
        raise FileError(f"cannot write {folder}: it is there; name a new folder")
    used = [d for d in range(cluster.num_devices) if (on == d).any()]
    rank = np.asarray(priority).tolist()
    stages: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
    for share in shares(graph, on, cluster.num_devices):
        runs = runs_of(share, rank) if share.ops else []
        whole = fused(share, runs)
        stages += [(share.device, run, whole.outputs[run[0]]) for run in runs]
    stages.sort(key=lambda stage: rank[stage[1][0]])
    inputs = program.timing_inputs()
    if other := sorted({dtype_name(x.dtype) for x in inputs if x.dtype not in _CPP_DTYPES}):
        raise PackageError(f"the loader in C++ has no inputs of {', '.join(other)}: convert them")
    values = dict(zip(program.input_tensors, inputs, strict=True))
    expected = run_program(program, inputs, values.__setitem__)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name[:40]}-", dir=folder.parent))
        written = temporary / "stages"
        written.mkdir()  # for who may read what else is written here: ``temporary`` is private
    except OSError as error:
        raise FileError(f"cannot write {folder}: {error.strerror}") from error
    try:
        rows: list[dict[str, Any]] = []
        for n, (device, ops, makes) in enumerate(stages):
            report(f"compiling stage {n + 1} of {len(stages)}", n / len(stages))
            reads = _package(
                program, ops, makes, values, cluster.devices[device].threads, written / f"{n}.pt2"
            )
            row = {"package": f"{n}.pt2", "device": used.index(device)}
            names = [graph.op_name[op] for op in ops]
            rows.append(row | {"reads": reads, "makes": [*makes], "operators": names})
        devices = [cluster.devices[d] for d in used]
        facts = {
            "model": graph.name,
            "torch": torch.__version__,
            "in_flight": in_flight,
            "devices": [
                {"name": d.name, "threads": d.threads, "cores": [*d.cores]} for d in devices
            ],
            "inputs": [*program.input_tensors],
            "forms": [
                {"dtype": dtype_name(x.dtype), "shape": [*x.shape], "strides": [*x.stride()]}
                for x in inputs
            ],
            "outputs": outputs,
            "stages": rows,
        }
        _write_loaders(written, facts, inputs)
        report("running what was written", None)
        if not program.is_random:
            with packaged.Pipeline(written) as pipeline:
                actual = pipeline(*inputs)
            tolerance = equality.Tolerance.of([*program.params, *expected], cluster)
            if wrong := equality.difference(actual, expected, tolerance):
                raise PackageError(f"the packages compute something else: {wrong}")
        os.replace(written, folder)
    except OSError as error:
        raise FileError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return len(stages)


def _package(
    program: Any,
    ops: tuple[int, ...],
    makes: tuple[int, ...],
    values: dict[int, Any],
    threads: int,
    path: Path,
) -> list[int]:
    """Write one package; the tensors that it reads.

    Raises:
        PackageError: Inductor refuses it.
    """
    from torch._inductor import aot_compile
    from torch._inductor.package import package_aoti

    run = recipe(program, ops, makes, {})
    params = {p: program.params[p].detach() for p in run.params}
    reads = [values[t] for t in run.reads]
    dumps = pytree.treespec_dumps
    options = {
        "aot_inductor.package": True,
        "aot_inductor.serialized_in_spec": dumps(pytree.tree_structure((tuple(reads), {}))),
        "aot_inductor.serialized_out_spec": dumps(pytree.tree_structure((0,) * len(makes))),
        "cpp.threads": threads,
        "compile_threads": 1,
    }
    try:
        with compiling():
            built: Any = aot_compile(
                graph_of(program, run, params, {}, frozen=True), tuple(reads), options=options
            )
            package_aoti(str(path), built)
    except Exception as error:  # Inductor's own, or the compiler's
        line = next(iter(str(error).splitlines()), "")[:200]
        raise PackageError(f"Inductor refuses a stage: {type(error).__name__}: {line}") from error
    return [*run.reads]


def _write_loaders(folder: Path, facts: dict[str, Any], inputs: list[Any]) -> None:
    """``stages.json`` and the loaders."""

    def listed(numbers: list[int]) -> str:
        return "{" + ", ".join(map(str, numbers)) + "}"

    stages = ",\n".join(
        f'    {{{s["device"]}, "{s["package"]}", {listed(s["reads"])}, {listed(s["makes"])}}}'
        for s in facts["stages"]
    )
    sizes = ",\n".join(
        f"      torch::zeros({listed([*x.shape])}, torch::dtype(torch::k{_CPP_DTYPES[x.dtype]}))"
        for x in inputs
    )
    header = _HEADER.replace("STAGES", stages)
    header = header.replace("THREADS", listed([d["threads"] for d in facts["devices"]]))
    header = header.replace("INPUTS", listed(facts["inputs"]))
    header = header.replace("OUTPUTS", listed(facts["outputs"]))
    header = header.replace("IN_FLIGHT", str(facts["in_flight"]))
    (folder / "stages.json").write_text(json.dumps(facts, indent=1))
    (folder / "run.py").write_text(Path(packaged.__file__).read_text())
    (folder / "pipeline.h").write_text(header)
    (folder / "main.cpp").write_text(_MAIN.replace("EXAMPLES", sizes))
    (folder / "CMakeLists.txt").write_text(_CMAKE)


_CPP_DTYPES = {
    torch.float32: "Float",
    torch.float64: "Double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.int16: "Short",
    torch.int8: "Char",
    torch.uint8: "Byte",
    torch.uint16: "UInt16",
    torch.uint32: "UInt32",
    torch.uint64: "UInt64",
    torch.bool: "Bool",
}

_CMAKE = """cmake_minimum_required(VERSION 3.18)
project(pipeline CXX)
set(CMAKE_CXX_STANDARD 20)
# -DCMAKE_PREFIX_PATH=$(python -c "import torch; print(torch.utils.cmake_prefix_path)")
find_package(Torch REQUIRED)
find_package(Threads REQUIRED)
add_executable(pipeline main.cpp)
target_link_libraries(pipeline "${TORCH_LIBRARIES}" Threads::Threads)
"""

_HEADER = """// Runs the packages of a folder in a pipeline: a thread for each device.
#pragma once

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <condition_variable>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

struct Stage {
  int device;
  std::string package;
  std::vector<int> reads, makes;
};

static const std::vector<Stage> kStages = {
STAGES};
static const std::vector<int> kThreads = THREADS;  // of each device
static const std::vector<int> kInputs = INPUTS, kOutputs = OUTPUTS;
static constexpr size_t kInFlight = IN_FLIGHT;

class Pipeline {
 public:
  using Tensors = std::vector<at::Tensor>;

  explicit Pipeline(const std::string& folder) {
    for (const auto& stage : kStages)
      packages_.push_back(std::make_unique<torch::inductor::AOTIModelPackageLoader>(
          folder + "/" + stage.package, "model", true));
  }

  // Outputs of each item, in order; the items are computed beside each other.
  std::vector<Tensors> run(const std::vector<Tensors>& items) {
    std::vector<std::map<int, at::Tensor>> values(items.size());
    std::vector<int> left(items.size(), (int)kThreads.size());
    std::mutex mutex;
    std::condition_variable changed;
    std::exception_ptr error;
    size_t done = 0;
    for (size_t i = 0; i < items.size(); i++)
      for (size_t k = 0; k < kInputs.size(); k++) values[i][kInputs[k]] = items[i].at(k);
    auto work = [&](int device) {
      c10::InferenceMode mode;
      at::set_num_threads(kThreads[device]);
      try {
        for (size_t i = 0; i < items.size(); i++) {
          for (size_t s = 0; s < kStages.size(); s++) {
            const Stage& stage = kStages[s];
            if (stage.device != device) continue;
            Tensors reads;
            {
              std::unique_lock<std::mutex> lock(mutex);
              changed.wait(lock, [&] {
                if (error) return true;
                for (int t : stage.reads)
                  if (!values[i].count(t)) return false;
                return i < done + kInFlight;
              });
              if (error) return;
              for (int t : stage.reads) reads.push_back(values[i][t]);
            }
            Tensors made = packages_[s]->run(reads);
            std::lock_guard<std::mutex> lock(mutex);
            for (size_t k = 0; k < made.size(); k++) values[i][stage.makes[k]] = made[k];
            changed.notify_all();
          }
          std::lock_guard<std::mutex> lock(mutex);
          if (--left[i] == 0) {  // only outputs are left of it
            std::map<int, at::Tensor> outputs;
            for (int t : kOutputs) outputs[t] = values[i][t];
            values[i] = std::move(outputs);
            done++;
            changed.notify_all();
          }
        }
      } catch (...) {
        std::lock_guard<std::mutex> lock(mutex);
        error = std::current_exception();
        changed.notify_all();
      }
    };
    std::vector<std::thread> threads;
    for (size_t device = 0; device < kThreads.size(); device++) threads.emplace_back(work, device);
    for (auto& thread : threads) thread.join();
    if (error) std::rethrow_exception(error);
    std::vector<Tensors> outputs;
    for (auto& each : values) {
      outputs.emplace_back();
      for (int t : kOutputs) outputs.back().push_back(each[t]);
    }
    return outputs;
  }

 private:
  std::vector<std::unique_ptr<torch::inductor::AOTIModelPackageLoader>> packages_;
};
"""

_MAIN = """// Times a stream of zeros: pipeline [FOLDER] [ITEMS]
#include "pipeline.h"

#include <chrono>
#include <iostream>

int main(int argc, char** argv) {
  Pipeline pipeline(argc > 1 ? argv[1] : ".");
  const Pipeline::Tensors item = {
EXAMPLES};
  const std::vector<Pipeline::Tensors> items(argc > 2 ? std::stoi(argv[2]) : 16, item);
  pipeline.run(items);
  const auto began = std::chrono::steady_clock::now();
  const auto outputs = pipeline.run(items);
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - began;
  for (const auto& x : outputs.back())
    std::cout << x.sizes() << " " << x.sum().item<double>() << "\\n";
  std::cout << took.count() / items.size() << " ms an item\\n";
}
"""
