"""What belongs together: axes, groups, exact costs, plans, cuts.

A model is run once and recorded (`recording` → `program`). Rules, one per operation, say how the axes of its tensors
are related (`rules`, in the words of `facts`, `flows` and `letters`; one file per family, `rules_*`); the algebra
solves them (`axes`, `analysis`). What is left free are groups of units (`groups`, `kinds`), exact or not (`zero_flow`).
A `Structure` (`structure`) answers for costs (`costs`) and resolves kept units into a `Plan` (`plan`), delivered as the
user's own module where its code can run the new sizes (`delivery`, `attributes`, `sizing`, `comparison`, `scaling`,
`multihead`, `mirrors`), else as a rewritten program (`rewriting`) that was tried beside the model (`replay`). `surgery`
and `cutting` carry plans out, `configurations` and `generation` see to what else a network says of itself, and
`verification` checks plans; `basis` tells coordinates that a plan counts on. `outlets` tells what becomes of a layer's
outputs.

Start with `tracing.trace`. This room knows nothing of curvature, scores or budgets.
"""

from apoptosis.structure.axes import Indices
from apoptosis.structure.basis import (
    basis_of,
    digest_of,
    mark_turned_,
    network_digest,
    sha256_of,
)
from apoptosis.structure.configurations import Refusal
from apoptosis.structure.cutting import carry_out, cut, deliver_, why_not_run
from apoptosis.structure.groups import Group, PinnedAxis, Site, Slice, Tie
from apoptosis.structure.kinds import KINDS
from apoptosis.structure.outlets import Norm, Outlet, Spot, find_outlets
from apoptosis.structure.plan import Plan, fingerprint_of
from apoptosis.structure.polynomials import Polynomial
from apoptosis.structure.randomness import random_state_put_back
from apoptosis.structure.recording import Example, model_tensors
from apoptosis.structure.rewriting import CutProgram
from apoptosis.structure.structure import Structure
from apoptosis.structure.surgery import check_basis, copy_with, cut_optimizer, zero
from apoptosis.structure.tracing import trace
from apoptosis.structure.twins import as_double, randomised, redrawn
from apoptosis.structure.verification import Verification, verify

__all__ = [
    "KINDS",
    "CutProgram",
    "Example",
    "Group",
    "Indices",
    "Norm",
    "Outlet",
    "PinnedAxis",
    "Plan",
    "Polynomial",
    "Refusal",
    "Site",
    "Slice",
    "Spot",
    "Structure",
    "Tie",
    "Verification",
    "as_double",
    "basis_of",
    "carry_out",
    "check_basis",
    "copy_with",
    "cut",
    "cut_optimizer",
    "deliver_",
    "digest_of",
    "find_outlets",
    "fingerprint_of",
    "mark_turned_",
    "model_tensors",
    "network_digest",
    "random_state_put_back",
    "randomised",
    "redrawn",
    "sha256_of",
    "trace",
    "verify",
    "why_not_run",
    "zero",
]
