import json
import re
import shlex

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import apoptosis as ap
import apoptosis.cli.sparsify
import apoptosis.cli.subject
from apoptosis.checkpoint import read_run
from apoptosis.cli.app import app
from apoptosis.criteria import CRITERIA, SALIENCIES
from apoptosis.planning.sparsity import SCOPES
from apoptosis.workflow import BATCH_NORM_POLICIES

RUN = CliRunner()
LOADING = tuple(f"  {word} " for word in ("import", "from", "small ="))
"""How lines begin that load a result again."""

SOURCE = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)
    )

def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))

def odd():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)) for _ in range(6)]
    return nn.Sequential(*blocks, nn.Linear(4, 3))

def all_odd():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))

def untraceable():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)
        def forward(self, x):
            y = self.a(x).relu()
            return self.b(y if float(y.sum()) > 0 else -y)
    torch.manual_seed(0)
    return Asks()

def fading():
    net = plain()
    with torch.no_grad():
        net[2].weight.mul_(1e-6)
    return net

def batches(num=3):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(num)
    ]

def both():
    return batches(), batches(2)
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "nets.py"
    path.write_text(SOURCE)
    return path


def invoke(own, *arguments, model="make", data="both"):
    words = ["prune", f"{own}:{model}", "--data", f"{own}:{data}", *map(str, arguments)]
    return RUN.invoke(app, words)


def sparsify(own, *arguments, keep="0.2", **names):
    scored = () if "--criterion" in arguments else ("--criterion", "oba")
    words = ("--unstructured", "--keep", keep, "--stages", "2", *scored, *arguments)
    return invoke(own, *words, **names)


def done(result):
    assert result.exit_code == 0, result.stderr
    return result.stdout


def as_json(result):
    return json.loads(done(result))


def unboxed(text: str) -> str:
    """Without the frame and the places where lines break."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


def refused(result, kind: str = "ConfigError") -> str:
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) <= 24, "one screen"
    text = unboxed(result.stderr)
    assert kind in text
    return text


def dense_of(own, model="make"):
    names: dict = {}
    exec(own.read_text(), names)
    return names[model]


@pytest.fixture(scope="module")
def fifth(own, tmp_path_factory):
    out = tmp_path_factory.mktemp("fifth") / "fifth"
    return done(sparsify(own, "--out", out)), out


def rows_of(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}


def test_asked_and_true_shares_stand_side_by_side_kept_and_removed(fifth):
    text, out = fifth
    weights, params = read_run(out).spent
    assert (weights.dense, weights.left) == (64 + 192 + 36, 58)
    assert rows_of(text)["weights"][1:] == ["20.00%", "19.863%", "80.00%", "80.137%", "292", "58"]
    assert rows_of(text)["params"][1:] == [
        "–",
        f"{params.got:.3%}",
        "–",
        f"{1 - params.got:.3%}",
        str(params.dense),
        str(params.left),
    ]
    assert "sparsified by oba in 2 stages on 24 samples" in unboxed(text)


def test_every_layer_is_shown_as_it_was_saved(fifth, own):
    text, out = fifth
    small = ap.load(out, dense=dense_of(own))
    rows = rows_of(text)
    for name in ("0.weight", "3.weight", "5.weight"):
        weight = small.get_parameter(name)
        nonzero = int(weight.count_nonzero())
        assert rows[name][1:] == [
            str(weight.numel()),
            str(nonzero),
            f"{nonzero / weight.numel():.1%}",
        ]
    assert sum(int(rows[n][2]) for n in ("0.weight", "3.weight", "5.weight")) == 58
    assert "Left whole" not in text


def test_the_lines_that_are_shown_load_a_network_that_keeps_its_zeros(fifth, own):
    text, out = fifth
    lines = [line for line in text.splitlines() if line.startswith(LOADING)]
    names: dict = {}
    exec("\n".join(line.strip() for line in lines), names)
    masks = ap.masks_of(names["small"])
    assert masks is not None
    assert masks.num_kept == 58
    x = torch.randn(5, 4)
    again = ap.load(out, dense=dense_of(own))
    torch.testing.assert_close(names["small"].eval()(x), again.eval()(x), rtol=0, atol=0)


def test_it_is_said_that_zeros_are_no_speed_and_what_the_file_saves(fifth):
    text, out = fifth
    assert "Zeros alone do not make a dense network faster, only its file smaller." in text
    assert "semi_structured" not in text, "there is nothing 2:4 here"
    sizes = [
        (out / name).stat().st_size / 1e3 for name in ("model.safetensors", "masks.safetensors")
    ]
    held = sum(sizes)
    assert f"Weights and masks take {held:,.1f} kB on disk" in text, (
        "headers outweigh a net so small"
    )


def test_held_out_data_are_evaluated_before_and_after(fifth, own):
    text, out = fifth
    settings = read_run(out).settings
    assert "on 16 samples held out" in text
    small = ap.load(out, dense=dense_of(own)).eval()
    batches = dense_of(own, "batches")(2)
    with torch.no_grad():
        losses = [float(torch.nn.functional.cross_entropy(small(x), y)) for x, y in batches]
    assert settings["evaluation"]["after"]["loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert settings["evaluation"]["before"]["count"] == 16
    assert settings["subject"]["seed"] == 0


def test_json_alone_is_printed_and_another_run_agrees(own, tmp_path):
    found = []
    for name in ("one", "two"):
        data = as_json(sparsify(own, "--out", tmp_path / name, "--json"))
        found.append([data["layers"], data["spent"], data["evaluation"], data["sparsity"]])
    assert found[0] == found[1]
    assert list(data) == [
        "model",
        "data",
        "kind",
        "settings",
        "spent",
        "sparsity",
        "evaluation",
        "layers",
        "left_whole",
        "training",
        "stages",
        "bytes",
        "seconds",
        "saved",
        "replaced",
        "load",
        "next",
    ]
    assert data["kind"] == "weights"
    assert data["sparsity"]["asked"] == {"kept": 0.2, "removed": 0.8}
    assert data["sparsity"]["got"]["kept"] == pytest.approx(58 / 292)
    assert [(one["stage"], one["samples"]) for one in data["stages"]] == [(1, 24), (2, 24)]
    assert sum(own["kept"] for own in data["layers"].values()) == 58
    assert data["bytes"]["saved"] == sum(data["bytes"]["files"].values())
    assert data["bytes"]["dense"] == 4 * (292 + 31 + 64) + 8, "float32, and the norm's own counter"
    assert set(data["bytes"]["files"]) == {"model.safetensors", "masks.safetensors", "run.json"}
    assert data["saved"] == str(tmp_path / "two")


def test_the_next_commands_can_be_typed(own, tmp_path):
    arguments = ("--name", "!5.weight", "--out", tmp_path / "a", "--json", "--scope", "layer")
    seen, data = [], as_json(sparsify(own, *arguments))
    for _ in range(2):
        command = shlex.split(data["next"])
        seen.append(data["next"])
        data = as_json(RUN.invoke(app, [*command[1:], "--json"]))
    assert "--batch-norm re-estimate" in seen[0]
    assert "--criterion magnitude" in seen[1]
    assert data["left_whole"] == ["5.weight"], "every option is carried along"
    assert data["settings"]["sparsity"]["scope"] == "layer"
    assert data["settings"]["batch_norm"] == "re-estimate"
    assert data["settings"]["stages"] == 2
    places = {p.name for p in tmp_path.iterdir()}
    assert places == {"a", "a-re-estimated", "a-re-estimated-magnitude"}


def test_a_network_without_norms_is_compared_with_magnitude_next(own, tmp_path):
    text = done(sparsify(own, "--out", tmp_path / "a", model="plain"))
    assert "batch norms" not in text
    assert "--criterion magnitude" in text
    whole = done(sparsify(own, "--out", tmp_path / "b", model="plain", keep="1"))
    assert "Next:" not in whole


def test_a_pattern_needs_no_other_word(own, tmp_path):
    out = tmp_path / "half"
    text = done(invoke(own, "--pattern", "2:4", "--out", out))
    assert "ap.masks.semi_structured(" in text
    small = ap.load(out, dense=dense_of(own))
    for name in ("0.weight", "3.weight", "5.weight"):
        groups = small.get_parameter(name).unflatten(1, (-1, 4))
        assert bool((groups.count_nonzero(-1) == 2).all())
    data = as_json(
        invoke(
            own, "--pattern", "2:4", "--criterion", "oba", "--unstructured", "--out", out, "--json"
        )
    )
    assert data["replaced"]
    assert data["sparsity"]["asked"]["kept"] == 0.5
    assert len(data["stages"]) == 2, "3:4, then 2:4"


def test_choices_reach_the_library(own, tmp_path):
    words = ("--criterion", "taylor", "--saliency", "paper", "--scope", "layer", "--allow-empty")
    words = (*words, "--batch-norm", "re-estimate", "--samples", "6", "--batch-size", "4")
    data = as_json(sparsify(own, *words, "--seed", "3", "--json", "--out", tmp_path / "a"))
    settings = data["settings"]
    assert settings["criterion"] == "taylor"
    assert settings["saliency"] == {"normalise": "max", "magnitude": 1.0}
    assert settings["sparsity"]["scope"] == "layer"
    assert settings["sparsity"]["allow_empty"]
    assert settings["batch_norm"] == "re-estimate"
    assert settings["subject"]["seed"] == 3
    assert [stage["samples"] for stage in data["stages"]] == [6, 6]
    assert [own["kept"] for own in data["layers"].values()] == [12, 38, 7]


def test_names_choose_weights_and_leave_them_out(own, tmp_path):
    out = ("--json", "--out", tmp_path / "a")
    assert list(as_json(sparsify(own, "--name", "3.*", *out))["layers"]) == ["3.weight"]
    data = as_json(sparsify(own, "--name", "!3.*", *out))
    assert list(data["layers"]) == ["0.weight", "5.weight"]
    assert "Left whole: 3.weight" in done(sparsify(own, "--name", "!3.*", *out[1:]))


def test_a_model_that_cannot_be_traced_loses_weights_all_the_same(own, tmp_path):
    words = ("--out", tmp_path / "a", "--json")
    assert invoke(own, "--keep-flops", "0.5", *words, model="untraceable").exit_code == 1
    data = as_json(sparsify(own, *words, model="untraceable"))
    assert data["sparsity"]["got"]["kept"] == pytest.approx(0.2, abs=0.02)


def test_the_digits_go_the_whole_way(tmp_path, monkeypatch):
    monkeypatch.setattr(apoptosis.cli.subject, "EPOCHS", 1)
    words = ["prune", "digits_cnn", "--data", "digits", "--samples", "200", "--json"]
    result = RUN.invoke(
        app,
        [*words, "--unstructured", "--keep", "0.1", "--stages", "2", "--out", str(tmp_path / "a")],
    )
    data = as_json(result)
    assert "training it on the digits for 1 epoch first" in result.stderr
    assert data["spent"][0]["left"] == 1659
    assert data["evaluation"]["before"]["count"] == 300
    refusal = refused(RUN.invoke(app, [*words, "--pattern", "2:4", "--out", str(tmp_path / "b")]))
    assert "stem.conv.weight (1 input)" in refusal
    remedy = shlex.split(re.findall(r"Leave them whole: (.*?)\. Where", refusal)[0])
    assert remedy == ["--name", "!stem.conv.weight"]
    again = [*words, "--pattern", "2:4", *remedy, "--out", str(tmp_path / "b")]
    assert as_json(RUN.invoke(app, again))["left_whole"] == ["stem.conv.weight"]


def test_weights_are_used_and_the_dense_file_is_left_alone(own, tmp_path):
    torch.manual_seed(7)
    model = dense_of(own, "plain")()
    model[2].bias.data.fill_(0.25)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    before = (tmp_path / "w.safetensors").read_bytes()
    words = ("--weights", tmp_path / "w.safetensors", "--out", tmp_path / "a")
    done(sparsify(own, *words, model="plain"))
    small = ap.load(tmp_path / "a", dense=dense_of(own, "plain"))
    assert bool((small[2].bias == 0.25).all())
    assert (tmp_path / "w.safetensors").read_bytes() == before


def test_a_dry_run_scores_and_writes_nothing(own, tmp_path, monkeypatch):
    monkeypatch.setattr(apoptosis.cli.sparsify, "sparsify", lambda *_, **__: pytest.fail("scored"))
    words = ("--dry-run", "--out", tmp_path / "a")
    text = done(sparsify(own, *words))
    assert "2 scoring passes over 3 batches each, 6 in all" in text
    assert "of 292 weights in 3 layers 20.00% would stay" in " ".join(text.split())
    assert ["2", "20.00%", "58"] in [line.split() for line in text.splitlines()]
    data = as_json(sparsify(own, *words, "--json", "--batch-norm", "re-estimate"))
    assert data["asked"] == {"kept": 0.2, "removed": 0.8}
    assert data["layers"] == {"0.weight": 64, "3.weight": 192, "5.weight": 36}
    assert [(s["stage"], s["weights"]) for s in data["stages"]] == [(1, 130), (2, 58)]
    assert (data["scoring_passes"], data["measuring_passes"], data["batches_per_pass"]) == (2, 2, 3)
    layers = as_json(sparsify(own, *words, "--json", "--scope", "layer"))
    assert layers["stages"][-1]["weights"] == 12 + 38 + 7
    free = as_json(sparsify(own, *words, "--json", "--criterion", "magnitude"))
    assert free["scoring_passes"] == 0
    assert not list(tmp_path.iterdir())


def test_a_dry_run_tells_what_the_run_then_does(own, tmp_path):
    for words in (["--pattern", "2:4"], ["--unstructured", "--keep", "0.3", "--stages", "3"]):
        words = (*words, "--json", "--out", tmp_path / "a", "--criterion", "magnitude")
        dry, run = as_json(invoke(own, *words, "--dry-run")), as_json(invoke(own, *words))
        assert [s["stage"] for s in dry["stages"]] == [s["stage"] for s in run["stages"]]
        assert dry["stages"][-1]["weights"] == run["spent"][0]["left"]


def test_the_place_of_the_result_has_a_name_of_its_own(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(SOURCE)
    words = ["prune", "nets.py:plain", "--data", "nets.py:both", "--criterion", "magnitude"]
    for options, name in (
        (["--unstructured", "--keep", "0.6"], "weights0.6"),
        (["--unstructured", "--keep", "0.6"], "weights0.6-2"),
        (["--pattern", "2:4"], "2of4"),
    ):
        text = done(RUN.invoke(app, [*words, *options, "--stages", "1"]))
        assert f"Saved: runs/nets.py-plain-magnitude-{name}\n" in text


MIXTURES = {
    "units among weights": (
        "--unstructured --keep-flops 0.3 --steps 2",
        "--keep-flops and --steps belong to pruning whole units, and --unstructured prunes single weights: write "
        "--keep 0.3 for --keep-flops, --stages 2 for --steps, or leave out --unstructured to prune units.",
        ["--unstructured --keep 0.3 --stages 2", "--keep-flops 0.3 --steps 2"],
    ),
    "both shares": (
        "--unstructured --keep 0.3 --keep-params 0.5",
        "--keep-params belongs to pruning whole units, and --unstructured prunes single weights: leave out "
        "--keep-params.",
        ["--unstructured --keep 0.3"],
    ),
    "no counterpart": (
        "--unstructured --keep 0.3 --aggregation paper --round-to 4",
        "leave out --aggregation and --round-to.",
        ["--unstructured --keep 0.3"],
    ),
    "widths and repairs": (
        "--unstructured --keep 0.3 --widths uniform --repair batch_norm",
        "write --batch-norm re-estimate for --repair, --scope layer for --widths.",
        ["--unstructured --keep 0.3 --batch-norm re-estimate --scope layer"],
    ),
    "no share": (
        "--unstructured --steps 2",
        "write --stages 2 for --steps and add --keep 0.1.",
        ["--unstructured --stages 2 --keep 0.1 --allow-empty"],
    ),
    "pattern": (
        "--pattern 2:4 --keep-flops 0.5 --widths uniform",
        "--keep-flops and --widths belong to pruning whole units, and --pattern prunes single weights: leave out "
        "--keep-flops and --widths",
        ["--pattern 2:4", "--keep-flops 0.5 --widths uniform"],
    ),
    "weights without the word": (
        "--keep 0.3 --stages 2",
        "--keep and --stages belong to pruning single weights: add --unstructured; or, to prune whole units, write "
        "--keep-flops 0.3 for --keep, --steps 2 for --stages.",
        ["--keep 0.3 --stages 2 --unstructured", "--keep-flops 0.3 --steps 2"],
    ),
    "scope without the word": (
        "--scope layer",
        "--scope belongs to pruning single weights: add --unstructured --keep 0.1; or, to prune whole units, write "
        "--widths uniform for --scope and add --keep-flops 0.5.",
        ["--scope layer --unstructured --keep 0.1", "--widths uniform --keep-flops 0.5"],
    ),
    "weights among units": (
        "--keep-flops 0.5 --stages 2",
        "--stages belongs to pruning single weights, and --keep-flops to whole units: for units write --steps 2 for "
        "--stages.",
        ["--keep-flops 0.5 --steps 2"],
    ),
    "share and pattern": (
        "--pattern 2:4 --keep 0.3",
        "a pattern fixes the share that stays. Leave out --keep; or, for a share without a pattern, type "
        "--unstructured --keep 0.3 alone.",
        ["--pattern 2:4", "--unstructured --keep 0.3"],
    ),
    "scope and pattern": ("--pattern 2:4 --scope layer", "leave out --scope.", ["--pattern 2:4"]),
    "nothing asked": (
        "--unstructured",
        "Say a share, --keep 0.1, or a pattern, --pattern 2:4.",
        ["--unstructured --keep 0.1 --allow-empty", "--unstructured --pattern 2:4"],
    ),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_words_that_do_not_go_together_are_refused_and_the_advice_works(own, tmp_path, name):
    typed, message, remedies = MIXTURES[name]
    out = ("--criterion", "magnitude", "--out", tmp_path / "a")
    assert message in refused(invoke(own, *typed.split(), *out))
    assert not list(tmp_path.iterdir())
    for remedy in remedies:
        done(invoke(own, *remedy.split(), *out, "--dry-run"))


def test_every_option_of_one_kind_is_refused_in_the_other(own):
    units = "--keep-flops 0.5,--keep-params 0.5,--keep-units 0.5,--steps 2,--aggregation paper,--repair batch_norm,"
    units += "--widths global,--per unit,--kind hidden,--round-to 4,--floor 2,--cap 0.5"
    for words in units.split(","):
        found = refused(invoke(own, "--unstructured", "--keep", "0.3", *words.split()))
        assert f"{words.split()[0]} belongs to pruning whole units" in found
    weights = (
        "--keep 0.5,--stages 2,--scope layer,--saliency plain,--batch-norm frozen,--allow-empty"
    )
    for words in weights.split(","):
        found = refused(invoke(own, *words.split(), "--keep-flops", "0.5"))
        assert f"{words.split()[0]} belongs to pruning single weights" in found


ERRORS = {
    "keep 0": (["--keep", "0"], "--keep 0 was asked for. It is the share of weights that stays"),
    "keep 10": (["--keep", "10"], "For 10 % write --keep 0.1."),
    "keep nan": (["--keep", "nan"], "--keep nan was asked for"),
    "keep -1": (["--keep", "-1"], "--keep -1 was asked for"),
    "pattern 4:2": (["--pattern", "4:2"], "whole numbers with 0 < N < M: 2:4"),
    "pattern text": (["--pattern", "2-4"], "it is written N:M, N weights of every M: 2:4"),
    "criterion": (["--keep", "0.3", "--criterion", "obaa"], "Did you mean 'oba'?"),
    "units": (
        ["--keep", "0.3", "--criterion", "taylor-gate"],
        "--criterion taylor-gate scores whole units, and single weights are to go. Those that score weights: oba,",
    ),
    "scope": (
        ["--keep", "0.3", "--scope", "layers"],
        "Did you mean 'layer'? There are global, layer",
    ),
    "saliency": (["--keep", "0.3", "--saliency", "papr"], "Did you mean 'paper'?"),
    "norms": (["--keep", "0.3", "--batch-norm", "reestimate"], "Did you mean 're-estimate'?"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_to_do_before_any_work(own, tmp_path, monkeypatch, name):
    monkeypatch.setattr(
        apoptosis.cli.sparsify, "find_subject", lambda *_, **__: pytest.fail("worked first")
    )
    arguments, message = ERRORS[name]
    words = ("--unstructured", *arguments, "--out", tmp_path / "a")
    assert message in refused(invoke(own, *words))
    assert not list(tmp_path.iterdir())


def test_names_that_fit_nothing_or_everything_are_refused(own, tmp_path):
    out = ("--out", tmp_path / "a")
    assert "'layer*' fits no trained weight" in refused(sparsify(own, "--name", "layer*", *out))
    found = refused(sparsify(own, "--name", "!0.*", "--name", "!*", *out))
    assert "--name '!0.*' --name '!*'" in found
    assert "names=" not in found


def test_per_cent_and_wrong_usage_exit_2(own):
    result = sparsify(own, keep="10%")
    assert result.exit_code == 2
    assert "10 % is written 0.1" in result.stderr
    assert sparsify(own, keep="tenth").exit_code == 2
    assert invoke(own, "--unstructured", "--keep", "0.1", "--stages", "0").exit_code == 2


def test_layers_that_a_pattern_does_not_divide_are_named_so_that_typing_them_works(own, tmp_path):
    words = ("--pattern", "2:4", "--criterion", "magnitude", "--json", "--out", tmp_path / "a")
    found = refused(invoke(own, *words, model="odd"))
    assert "0.2.weight (6 inputs)" in found
    assert "and 2 more. Leave them whole: --name '!*.2.weight'." in found
    data = as_json(invoke(own, *words, "--name", "!*.2.weight", model="odd"))
    assert data["left_whole"] == [f"{i}.2.weight" for i in range(6)]
    hopeless = refused(invoke(own, "--pattern", "3:5", *words[2:], model="all_odd"))
    assert "take another M, or a share without a pattern, --unstructured --keep 0.6." in hopeless
    done(invoke(own, "--unstructured", "--keep", "0.6", *words[2:], model="all_odd"))


def test_a_layer_that_would_empty_is_told_in_typed_words_that_work(own, tmp_path):
    words = ("--criterion", "magnitude", "--out", tmp_path / "a")
    found = refused(sparsify(own, *words, model="fading"), "BudgetError")
    assert "would leave none of 2.weight" in found
    assert "keep a share of every layer (--scope layer); or insist: --allow-empty." in found
    assert "shares" not in found
    assert "reached" not in found
    assert not list(tmp_path.iterdir())
    for remedy in (["--scope", "layer"], ["--allow-empty"]):
        data = as_json(sparsify(own, *words, *remedy, "--json", model="fading"))
        assert (data["layers"]["2.weight"]["kept"] == 0) == (remedy == ["--allow-empty"])


def test_a_share_of_every_layer_is_named_that_the_smallest_can_keep(own, tmp_path):
    words = ("--criterion", "magnitude", "--out", tmp_path / "a")
    found = refused(sparsify(own, *words, keep="0.01", model="fading"), "BudgetError")
    (remedy,) = re.findall(r"\((--scope layer --keep [\d.]+)\)", found)
    done(invoke(own, "--unstructured", "--stages", "2", *remedy.split(), *words, model="fading"))


def test_norms_that_are_not_there_cannot_be_measured(own, tmp_path, monkeypatch):
    monkeypatch.setattr(apoptosis.cli.sparsify, "sparsify", lambda *_, **__: pytest.fail("scored"))
    words = ("--batch-norm", "re-estimate", "--out", tmp_path / "a")
    found = refused(sparsify(own, *words, model="plain"), "ModelError")
    assert "Leave out --batch-norm re-estimate." in found


def test_frozen_norms_are_remarked_on(fifth, own, tmp_path):
    said = "Its batch norms still have the dense network's statistics; --batch-norm re-estimate"
    assert said in fifth[0]
    words = ("--batch-norm", "re-estimate", "--out", tmp_path / "a")
    assert said not in done(sparsify(own, *words))


def test_a_place_that_holds_something_else_is_refused_before_the_work(own, tmp_path, monkeypatch):
    monkeypatch.setattr(
        apoptosis.cli.sparsify, "find_subject", lambda *_, **__: pytest.fail("worked first")
    )
    (tmp_path / "thesis.tex").write_text("years of work")
    assert "holds 'thesis.tex'" in refused(sparsify(own, "--out", tmp_path), "CheckpointError")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_ctrl_c_leaves_nothing_behind_and_an_earlier_result_as_it_was(own, tmp_path, monkeypatch):
    done(sparsify(own, "--criterion", "magnitude", "--out", tmp_path / "a"))
    before = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(apoptosis.cli.sparsify, "sparsify", interrupted)
    for place in ("a", "b"):
        result = sparsify(own, "--out", tmp_path / place)
        assert (result.exit_code, result.stdout) == (130, "")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == before


def test_help_shows_both_kinds_with_their_choices_and_defaults():
    text = unboxed(RUN.invoke(app, ["prune", "--help"]).output)
    panels = [
        text.index(f" {name} ")
        for name in ("Units (structured)", "Single weights (unstructured)", "Both")
    ]
    assert panels == sorted(panels)
    weights = text[panels[1] : panels[2]]
    for default in (SCOPES[0], BATCH_NORM_POLICIES[0]):
        assert f"[default: {default}]" in weights
    assert "20 unless said" in weights
    for word in (*SCOPES, *BATCH_NORM_POLICIES, *SALIENCIES):
        assert word in weights
    for example in ("--unstructured --keep 0.1", "--pattern 2:4", "--keep-flops 0.5"):
        assert example in text[: panels[0]]


@pytest.mark.parametrize("criterion", [n for n, entry in CRITERIA.items() if entry.score])
def test_every_criterion_of_weights_runs(own, tmp_path, criterion):
    words = ("--criterion", criterion, "--out", tmp_path / "a", "--allow-empty")
    assert "Saved:" in done(sparsify(own, *words))
