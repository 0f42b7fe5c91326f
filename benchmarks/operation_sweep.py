"""Claim: no operation of torch that a forward may call ends in a raw error or in a wrong cut, however it is spelled.

Operations and arguments are torch's own list for its tests (`op_db`). Of each, some samples are called by position, by
keyword and as a method, in a model whose first argument comes out of a linear layer and whose results go into one. The
model is traced; every exact group is verified, and every group is cut by one unit and run. Then its curvature is
compared with the reference. What has no axis rule, and what takes the generic path, is listed.

    python benchmarks/operation_sweep.py                     # all, some minutes
    python benchmarks/operation_sweep.py topk sort pdist     # some
"""

import argparse
import inspect
import itertools
import sys
import time
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))  # not installed

import torch
from torch import Tensor, nn
from torch.overrides import get_testing_overrides
from torch.utils._pytree import tree_flatten, tree_map

from apoptosis.curvature import curvature_product, reference_product
from apoptosis.errors import ApoptosisError
from apoptosis.structure import Structure, cut, trace, verify
from apoptosis.task import Task

FEATURES = 5
SKIPPED = (
    *("sparse.", "jiterator", "torch.", "masked.", "signal.", "_", "to_sparse", "empty"),
    *("new_empty", "resize", "item", "cauchy", "exponential", "geometric", "log_normal"),
)
"""Sparse and compiled operations, backward formulas, distributions, memory as it is found."""
FORMS = ("positional", "keyword", "method")


class Called(nn.Module):
    """A linear layer, one call, and a linear layer behind each of its results."""

    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        super().__init__()
        self.call = call
        self.tensors = nn.ParameterList()
        self.first: Tensor | None = None
        self.arguments = tree_map(self._keep, (list(args), dict(kwargs)))
        assert self.first is not None, "an operation on tensors"
        self.make = nn.Linear(FEATURES, self.first.shape[-1])
        results = self._results(torch.zeros(*self.first.shape[:-1], FEATURES))
        self.heads = nn.ModuleList(nn.Linear(r.shape[-1], 2) for r in results)

    def forward(self, x: Tensor) -> list[Tensor]:
        """A number or two of each result."""
        return [head(r) for head, r in zip(self.heads, self._results(x), strict=True)]

    def _results(self, x: Tensor) -> list[Tensor]:
        made = self.tensors[0] + 0.01 * torch.tanh(self.make(x.to(self.make.weight.dtype)))
        supply = iter([made, *itertools.islice(self.tensors, 1, None)])
        held = {
            kept.number: next(supply)
            for kept in tree_flatten(self.arguments)[0]
            if isinstance(kept, Kept)
        }
        args, kwargs = tree_map(
            lambda a: held[a.number] if isinstance(a, Kept) else a, self.arguments
        )
        found = tree_flatten(self.call(*args, **kwargs))[0]
        wide = self.make.weight.dtype
        results = [r for r in found if isinstance(r, Tensor) and r.is_floating_point()]
        return [r.to(wide).reshape(1) if r.ndim == 0 else r.to(wide) for r in results]

    def _keep(self, item: Any) -> Any:
        if not isinstance(item, Tensor) or not item.is_floating_point():
            return item
        if self.first is None:
            self.first = item
        self.tensors.append(nn.Parameter(item.detach().clone()))
        return Kept(len(self.tensors) - 1)


@dataclass(frozen=True)
class Kept:
    """A tensor among the arguments."""

    number: int


@dataclass
class Findings:
    """All that was seen."""

    tried: int = 0
    wrong: list[str] = field(default_factory=list)
    without_rule: Counter[str] = field(default_factory=Counter)
    generic: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def note(self, what: str, error: BaseException | str) -> None:
        """Something that should not be."""
        line = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self.wrong.append(f"{what}: {line.strip().splitlines()[0][:220] if line.strip() else line}")


def operators() -> list[Any]:
    """torch's own list, whose file asks for a package that nothing here needs."""
    if "expecttest" not in sys.modules:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        stand_in.assert_expected_inline = None  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if torch.float64 in op.dtypes and not op.name.startswith(SKIPPED)]


def samples_of(op: Any, most: int) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Some samples with an axis that can shrink, as different in their arguments as can be had."""
    seen: set[str] = set()
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float64), 60):
        tensors = [
            t
            for t in tree_flatten((sample.input, sample.args, sample.kwargs))[0]
            if isinstance(t, Tensor)
        ]
        first = next((t for t in tensors if t.is_floating_point()), None)
        if first is None or first.ndim == 0 or min(first.shape) == 0 or first.numel() > 20000:
            continue
        if first.shape[-1] < 2 or any(t.layout != torch.strided for t in tensors):
            continue
        kind = f"{len(sample.args)}{sorted(sample.kwargs)}"
        if kind in seen:
            continue
        seen.add(kind)
        yield sample.input, tuple(sample.args), dict(sample.kwargs)
        if len(seen) == most:
            return


def forms_of(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """The same call by position, by keyword and as a method."""
    yield "positional", op.op, args, kwargs
    like = get_testing_overrides().get(op.op)
    if like is not None:
        try:
            bound = inspect.signature(like).bind(*args, **kwargs)
        except TypeError:
            bound = None
        kinds = {p.kind for p in inspect.signature(like).parameters.values()}
        if bound is not None and inspect.Parameter.VAR_POSITIONAL not in kinds:
            yield "keyword", op.op, (), dict(bound.arguments)
    name = op.name.rpartition(".")[2]
    if isinstance(args[0], Tensor) and getattr(Tensor, name, None) is not None:
        yield "method", method(name), args, kwargs


def method(name: str) -> Callable[..., Any]:
    """`x.name(…)`."""
    return lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs)


def try_structure(what: str, model: Called, x: Tensor, findings: Findings) -> None:
    """Trace, verify, cut one unit of each group, and run."""
    try:
        structure = trace(model, x)
        findings.without_rule.update({name for name, _ in structure.without_rule})
        failed = verify(structure).failed
        if failed:
            findings.note(f"{what} verify", str(failed))
        for group in structure.groups:
            cut_and_run(what, model, structure, group.name, x, findings)
    except ApoptosisError as error:
        findings.note(f"{what} structure (ours)", error)
    except Exception as error:  # noqa: BLE001 - what is looked for
        findings.note(f"{what} structure", error)


def cut_and_run(  # noqa: PLR0913, PLR0917 - a step of the one above
    what: str, model: Called, structure: Structure, name: str, x: Tensor, findings: Findings
) -> None:
    """One unit less; a refusal in words is fine, a network that does not run is not."""
    step = structure.step(name)
    if any(structure[other].size - num < structure[other].smallest for other, num in step.items()):
        return
    try:
        plan = structure.plan({o: range(structure[o].size - n) for o, n in step.items()})
    except ApoptosisError as error:
        findings.refused[f"{what}: {str(error)[:100]}"] += 1
        return
    shapes = [tuple(r.shape) for r in cut(model, plan)(x)]
    if shapes != [tuple(r.shape) for r in model(x)]:
        findings.note(f"{what} cut {name}", f"results of shapes {shapes}")


def try_curvature(what: str, model: Called, x: Tensor, findings: Findings) -> None:
    """The product along the parameters, against the reference."""
    task = replace(
        Task.classification(),
        loss=lambda outputs, _batch: sum(torch.sin(o).mean() for o in outputs),
        count=lambda _batch: 1,
    )
    try:
        expected = reference_product(model, [(x, x)], task, kind="hessian").product
    except Exception:  # noqa: BLE001 - torch itself has no second derivative
        return
    if any(not t.isfinite().all() for t in expected.values()):
        return
    try:
        found = curvature_product(model, [(x, x)], task, kind="hessian")
    except ApoptosisError as error:
        findings.refused[f"{what} curvature: {str(error)[:100]}"] += 1
        return
    except Exception as error:  # noqa: BLE001 - what is looked for
        findings.note(f"{what} curvature", error)
        return
    findings.generic.update(found.fallbacks.keys())
    scale = max((float(t.abs().max()) for t in expected.values() if t.numel()), default=1.0)
    for name, tensor in expected.items():
        if (
            tensor.numel()
            and float((found.product[name] - tensor).abs().max()) > 1e-6 * scale + 1e-9
        ):
            findings.note(f"{what} curvature", f"product of {name} differs")


def sweep(names: list[str], most: int, findings: Findings) -> None:
    """Every operation, sample and form."""
    for op in operators():
        if names and op.name not in names and op.name.rpartition(".")[2] not in names:
            continue
        try:
            samples = list(samples_of(op, most))
        except Exception:  # noqa: BLE001 - of another machine
            continue
        for number, (first, args, kwargs) in enumerate(samples):
            for form, call, args_, kwargs_ in forms_of(op, (first, *args), kwargs):
                what = f"{op.name}[{number}] {form}"
                try:
                    torch.manual_seed(0)
                    model = Called(call, args_, kwargs_).double().eval()
                    tensor = model.first
                    assert tensor is not None, "checked by the model"
                    x = torch.randn(*tensor.shape[:-1], FEATURES, dtype=torch.float64)
                    model(x)
                except Exception:  # noqa: BLE001 - torch does not take it so
                    continue
                findings.tried += 1
                try_structure(what, model, x, findings)
                try_curvature(what, model, x, findings)


def main() -> None:
    """Print what was found; the status is 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="operations; all unless given")
    parser.add_argument("--samples", type=int, default=2, help="of each operation, at most")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    findings, start = Findings(), time.perf_counter()
    sweep(options.names, options.samples, findings)
    print(f"{findings.tried} calls tried in {time.perf_counter() - start:.0f} s")
    print("without an axis rule:", ", ".join(sorted(findings.without_rule)))
    print("generic path of the curvature:", ", ".join(sorted(findings.generic)))
    print("refused in words:", *findings.refused, sep="\n  ")
    print(f"wrong ({len(findings.wrong)}):", *findings.wrong, sep="\n  ")
    sys.exit(bool(findings.wrong))


if __name__ == "__main__":
    main()
