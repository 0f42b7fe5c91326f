"""What a cut network of transformers writes by itself can be loaded, bit for bit, or is not written."""

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.checkpoint import load, save
from apoptosis.errors import CheckpointError, ModelError
from apoptosis.planning import Budget, Selection
from apoptosis.records import Outcome
from apoptosis.structure import Plan, Structure, cut, trace
from oracles.library import transformers_model

pytest.importorskip("transformers")

WORDS = 37
NO_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
SMALL: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": WORDS,
    "max_position_embeddings": 16,
}
WRITER = {**SMALL, **NO_IDS, "num_key_value_heads": 2}


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    return transformers_model(
        "LlamaForCausalLM", "LlamaConfig", "sdpa", **{**WRITER, **options}
    ).eval()


def bert() -> Any:
    torch.manual_seed(0)
    return transformers_model("BertForMaskedLM", "BertConfig", "sdpa", **SMALL).eval()


def vit() -> Any:
    torch.manual_seed(0)
    own = {k: v for k, v in SMALL.items() if k not in ("vocab_size", "max_position_embeddings")}
    return transformers_model(
        "ViTForImageClassification", "ViTConfig", "sdpa", **own, image_size=16, patch_size=8
    ).eval()


def rwkv() -> Any:
    torch.manual_seed(0)
    own = {k: v for k, v in SMALL.items() if "heads" not in k and "position" not in k}
    return transformers_model("RwkvForCausalLM", "RwkvConfig", **own, **NO_IDS).eval()


def words(num: int = 2) -> dict[str, Tensor]:
    return {
        "input_ids": torch.randint(1, WORDS, (num, 6), generator=torch.Generator().manual_seed(3))
    }


def halves(structure: Structure, kind: str) -> Plan:
    """Every group of a kind at half of its width."""
    own = [group for group in structure.groups if group.kind == kind]
    assert own, f"no {kind}"
    return structure.plan({group.name: range(0, group.size, 2) for group in own})


def reloaded(small: Any, folder: Path) -> Any:
    small.save_pretrained(folder)
    attention = small.config._attn_implementation
    return type(small).from_pretrained(folder, attn_implementation=attention).eval()


def assert_same_outputs(a: nn.Module, b: nn.Module, inputs: dict[str, Tensor]) -> None:
    with torch.no_grad():
        assert torch.equal(a(**inputs).logits, b(**inputs).logits)


EXPRESSED: list[tuple[Callable[[], Any], str, dict[str, int]]] = [
    (llama, "hidden", {"intermediate_size": 24}),
    (llama, "stream", {"hidden_size": 12}),
    (llama, "kv_head", {"num_attention_heads": 2, "num_key_value_heads": 1}),
    (llama, "query_head", {"num_attention_heads": 2}),
    (bert, "hidden", {"intermediate_size": 24}),
    (vit, "hidden", {"intermediate_size": 24}),
    (rwkv, "hidden", {"intermediate_size": 24}),
]


@pytest.mark.parametrize(("make", "kind", "numbers"), EXPRESSED)
def test_what_numbers_can_say_comes_back_bit_for_bit(make, kind, numbers, tmp_path):
    model = make()
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16)} if make is vit else words()
    before = json.dumps(model.config.to_dict(), default=str)
    plan = halves(trace(model, inputs), kind)
    small = cut(model, plan)
    assert {k: getattr(small.config, k) for k in numbers} == numbers
    assert json.dumps(model.config.to_dict(), default=str) == before
    assert all(own.config is not model.config for own in small.modules() if hasattr(own, "config"))
    again = reloaded(small, tmp_path)
    assert_same_outputs(again, small, inputs)
    other = {k: v[:1] for k, v in inputs.items()}
    assert_same_outputs(again, small, other)


def test_copies_pickles_and_further_cuts_keep_it(tmp_path):
    model, inputs = llama(), words()
    structure = trace(model, inputs)
    first = halves(structure, "hidden")
    small = cut(model, first)
    assert_same_outputs(reloaded(copy.deepcopy(small), tmp_path / "copy"), small, inputs)
    written = io.BytesIO()
    torch.save(small, written)
    written.seek(0)
    back = torch.load(written, weights_only=False)
    assert_same_outputs(reloaded(back, tmp_path / "pickle"), small, inputs)
    again = structure.after(first)
    smaller = cut(small, again.plan({g.name: range(8) for g in again.groups if g.kind == "hidden"}))
    assert (small.config.intermediate_size, smaller.config.intermediate_size) == (24, 8)
    assert_same_outputs(reloaded(smaller, tmp_path / "smaller"), smaller, inputs)


def uneven(model: Any, inputs: Any) -> Plan:
    structure = trace(model, inputs)
    hidden = [group for group in structure.groups if group.kind == "hidden"]
    return structure.plan({group.name: range(24 + n) for n, group in enumerate(hidden)})


def test_what_no_number_can_say_is_refused_in_words(tmp_path):
    model, inputs = llama(), words()
    small = cut(model, uneven(model, inputs))
    written = io.BytesIO()
    torch.save(small, written)
    written.seek(0)
    for own in (
        small,
        small.model,
        copy.deepcopy(small),
        copy.deepcopy(small).train(),
        torch.load(written, weights_only=False),
    ):
        with pytest.raises(
            CheckpointError,
            match=r"down_proj\.weight has 24 and .*down_proj\.weight 25 in the place of 48.*"
            r"`ap\.save\(folder, outcome\)`.*widths=\"uniform\"",
        ):
            own.save_pretrained(tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    assert small.config.intermediate_size == 48
    model.save_pretrained(tmp_path / "dense")
    assert_same_outputs(type(model).from_pretrained(tmp_path / "dense").eval(), model, inputs)


def test_one_more_cut_makes_it_one_number_again(tmp_path):
    model, inputs = llama(), words()
    first = uneven(model, inputs)
    later = trace(model, inputs).after(first)
    plan = later.plan({g.name: range(20) for g in later.groups if g.kind == "hidden"})
    small = cut(cut(model, first), plan)
    assert small.config.intermediate_size == 20
    assert_same_outputs(reloaded(small, tmp_path), small, inputs)


@pytest.mark.parametrize("meta", [False, True])
def test_a_checkpoint_gives_it_back(tmp_path, meta):
    model, inputs = llama(), words()
    for name, plan in (
        ("even", halves(trace(model, inputs), "hidden")),
        ("uneven", uneven(model, inputs)),
    ):
        small = cut(model, plan)
        folder = save(tmp_path / name, Outcome(small, plan, example_inputs=inputs))

        def make():
            with torch.device("meta" if meta else "cpu"):
                return llama()

        if meta:  # rotary frequencies are not persistent
            with pytest.raises(CheckpointError, match="not saved with the network"):
                load(folder, make)
            continue
        back = load(folder, make)
        if name == "uneven":
            with pytest.raises(CheckpointError, match="in the place of 48"):
                back.save_pretrained(tmp_path / "refused")
        else:
            assert_same_outputs(reloaded(back, tmp_path / "own"), small, inputs)


def test_without_an_example_nothing_is_taken_on_trust(tmp_path):
    model, inputs = llama(), words()
    plan = Plan.from_json(halves(trace(model, inputs), "hidden").to_json())
    with pytest.raises(CheckpointError, match="without `example_inputs` to `cut`"):
        cut(model, plan).save_pretrained(tmp_path / "refused")
    small = cut(model, plan, example_inputs=inputs)
    assert_same_outputs(reloaded(small, tmp_path), small, inputs)


def test_inside_another_network_it_is_settled_as_well(tmp_path):
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = llama().model
            self.head = nn.Linear(24, 2)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.body(input_ids=ids).last_hidden_state.mean(1))

    model, ids = Reader().eval(), words()["input_ids"]
    small = cut(model, halves(trace(model, ids), "hidden"))
    assert small.body.config.intermediate_size == 24
    small.body.save_pretrained(tmp_path)
    again = type(small.body).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(
            again(input_ids=ids).last_hidden_state, small.body(input_ids=ids).last_hidden_state
        )


class Config:
    """A configuration as transformers has them, of which forward reads a number."""

    def __init__(self, width: int = 16, hidden: int = 12) -> None:
        self.width, self.hidden = width, hidden

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Config":
        return cls(**data)


class Scaled(nn.Module):
    """A network that saves itself; some of its kind multiply by a number of the configuration."""

    reads = False

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.up = nn.Linear(3, config.width)
        self.down = nn.Linear(config.width, 2)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.config.width**0.5 if self.reads else 1.0
        return self.down(torch.tanh(self.up(x)) * scale)

    def save_pretrained(self, folder: Path) -> None:
        Path(folder).write_text(json.dumps(self.config.to_dict()))


class Reads(Scaled):
    reads = True


class Keeps(Scaled):
    """A number of the configuration that is kept as a float, or as numbers that are not saved."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.scale = config.width**-0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)) * self.scale)


class Holds(Scaled):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.register_buffer("scale", torch.tensor(config.width**-0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)) * self.scale)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Reads, "it computes something else then"),
        (Keeps, r"scale would be 0\.353553 and is 0\.25"),
        (Holds, "scale would hold other numbers"),
    ],
)
def test_a_number_that_changes_more_than_widths_is_not_set(kind, why, tmp_path):
    model, x = kind(Config()).eval(), torch.randn(4, 3)
    small = cut(model, trace(model, x).plan({"up": range(8)}))
    with pytest.raises(CheckpointError, match=f"width = 8, and {why}"):
        small.save_pretrained(tmp_path / "refused")
    assert small.config.width == 16
    torch.testing.assert_close(small(x), cut(model, trace(model, x).plan({"up": range(8)}))(x))


def test_one_that_changes_widths_alone_is_set(tmp_path):
    model, x = Scaled(Config()).eval(), torch.randn(4, 3)
    small = cut(model, trace(model, x).plan({"up": range(8)}))
    small.save_pretrained(tmp_path / "config.json")
    assert (model.config.width, small.config.width) == (16, 8)
    assert json.loads((tmp_path / "config.json").read_text()) == {"width": 8, "hidden": 12}


def test_one_way_of_saving_without_such_a_configuration_is_refused(tmp_path):
    class Other(nn.Sequential):
        config = {"width": 16}

        def save_pretrained(self, folder: Path) -> None:
            raise AssertionError(f"{folder}: nobody could load it")

    model, x = Other(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2)).eval(), torch.randn(4, 3)
    small = cut(model, trace(model, x).plan({"0": range(8)}))
    with pytest.raises(CheckpointError, match="how the dense network was made"):
        small.save_pretrained(tmp_path)


@pytest.mark.parametrize(("widths", "loads"), [("uniform", True), ("global", False)])
def test_prune_delivers_one_that_saves_itself_or_says_why_not(widths, loads, tmp_path):
    model = llama()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(5)
    batches = [words(3), words(3)]
    outcome = ap.prune(
        model,
        batches,
        Budget(params=0.8),
        ap.Task.language_model(),
        criterion="magnitude",
        steps=2,
        selection=Selection(widths=widths, kinds=("hidden",)),
    )
    counts = {left for left, _ in outcome.plan.counts().values()}
    assert (len(counts) == 1) is loads
    if loads:
        assert_same_outputs(reloaded(outcome.model, tmp_path), outcome.model, batches[0])
    else:
        with pytest.raises(CheckpointError, match=r"ap\.save"):
            outcome.model.save_pretrained(tmp_path)


class Writer(nn.Module):
    """Its generation keeps a state of a width that it was made with; its forward needs none."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 16
        self.table = nn.Embedding(WORDS, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, WORDS)

    def forward(self, input_ids: Tensor, state: Tensor | None = None) -> Tensor:
        mixed = self.up(self.table(input_ids)).cumsum(1)
        return self.down(torch.tanh(mixed if state is None else mixed + state))

    def generate(self, words: Tensor, max_new_tokens: int, *, do_sample: bool = False) -> Tensor:
        assert not do_sample
        for _ in range(max_new_tokens):
            scores = self(words, torch.zeros(self.width))
            words = torch.cat([words, scores[:, -1:].argmax(-1)], dim=1)
        return words


@pytest.mark.parametrize("by_name", [True, False])
def test_generate_fails_in_words_where_a_state_has_the_old_width(by_name):
    model, inputs = Writer().eval(), words()
    structure = trace(model, inputs if by_name else inputs["input_ids"])
    plan = structure.plan({"up": range(10)})
    small = cut(model, plan)
    assert small(**inputs).isfinite().all()
    for own in (small, copy.deepcopy(small)):
        with pytest.raises(
            ModelError, match=r"`generate` was called on a cut Writer.*state or cache"
        ):
            own.generate(inputs["input_ids"], max_new_tokens=2)
    assert model.generate(inputs["input_ids"], max_new_tokens=2).shape == (2, 8)
    again = structure.after(plan)
    smaller = cut(small, again.plan({"up": range(5)}))
    with pytest.raises(ModelError, match="state or cache"):
        smaller.generate(inputs["input_ids"], max_new_tokens=2)


def test_generate_goes_on_where_it_can():
    model, inputs = llama(), words()
    small = cut(model, uneven(model, inputs))
    assert "generate" not in vars(small)
    assert small.generate(inputs["input_ids"], max_new_tokens=2, do_sample=False).shape == (2, 8)
