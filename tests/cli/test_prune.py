import json
import shlex

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import apoptosis as ap
import apoptosis.cli.prune
import apoptosis.cli.subject
from apoptosis.checkpoint import read_run
from apoptosis.cli.app import app

RUN = CliRunner()
LOADING = tuple(f"  {word} " for word in ("import", "from", "small ="))
"""How lines begin that load a result again."""

SOURCE = """
import torch
from torch import nn
from apoptosis import Task

def make():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)
    )

def with_inputs():
    return make(), torch.zeros(1, 4)

def frozen():
    return make().requires_grad_(False)

def one_layer():
    return nn.Linear(4, 3)

def mean_of_hidden():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)
        def forward(self, x):
            y = self.a(x).relu()
            return self.b(y.reshape(len(x), 8))
    return Mean()

def batches(num=3):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(num)
    ]

def both():
    return batches(), batches(2)

def squares():
    task = Task.classification(nn.functional.mse_loss)
    return [(torch.ones(8, 4), torch.ones(8, 3))], None, task

def without_labels():
    return [x for x, _ in batches()]

def images():
    return [(torch.randn(2, 1, 28, 28), torch.zeros(2, dtype=torch.int64))]

def wide():
    return [(torch.randn(8, 5), torch.zeros(8, dtype=torch.int64))]

def many_classes():
    return [(torch.randn(8, 4), torch.full((8,), 7))]

def not_a_number():
    return batches(), [(torch.full((8, 4), float("nan")), torch.zeros(8, dtype=torch.int64))]

def bad_evaluation():
    return batches(), wide()

def breaks_later():
    class Breaks:
        def __iter__(self):
            yield batches()[0]
            raise KeyError("image 17")
    return Breaks()
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(SOURCE)
    return path


def prune(own, *arguments, model="make", data="both"):
    return RUN.invoke(
        app,
        [
            "prune",
            f"{own}:{model}",
            "--data",
            f"{own}:{data}",
            "--steps",
            "2",
            *map(str, arguments),
        ],
    )


def done(result):
    assert result.exit_code == 0, result.stderr
    return result.stdout


def refused(result, kind: str) -> str:
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) <= 24, "one screen"
    text = unboxed(result.stderr)
    assert kind in text
    return text


def unboxed(text: str) -> str:
    """Without the frame and the places where lines break."""
    return "".join(text.replace("│", "").split())


@pytest.fixture(scope="module")
def half(own, tmp_path_factory):
    out = tmp_path_factory.mktemp("half") / "half"
    return done(prune(own, "--keep-flops", "0.5", "--out", out)), out


def test_asked_and_got_stand_side_by_side(half):
    text, out = half
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    spent = {line.what: line for line in read_run(out).spent}
    assert rows["flops"][1:3] == ["50.0%", f"{spent['flops'].got:.2%}"]
    assert spent["flops"].got <= 0.5
    assert rows["params"][1:3] == ["–", f"{spent['params'].got:.2%}"]
    assert rows["units"][3:] == ["28", str(spent["units"].left)]


def test_the_lines_that_are_shown_load_the_network(half, own):
    text, out = half
    lines = [line for line in text.splitlines() if line.startswith(LOADING)]
    names: dict = {}
    exec("\n".join(line.strip() for line in lines), names)
    small, dense = names["small"], ap.load(out, dense=torch_dense(own))
    x = torch.randn(5, 4)
    torch.testing.assert_close(small(x), dense(x), rtol=0, atol=0)
    rows = [line.split() for line in text.splitlines()]
    start = rows.index(["group", "before", "after"]) + 1
    widths = [small[0].out_features, small[3].out_features]
    assert rows[start : start + 2] == [["0", "16", str(widths[0])], ["3", "12", str(widths[1])]]


def torch_dense(own):
    names: dict = {}
    exec(own.read_text(), names)
    return names["make"]


@pytest.mark.parametrize("model", ["make", "with_inputs"])
def test_lines_to_load_fit_the_kind_of_function(own, tmp_path, model, monkeypatch):
    arguments = ("--keep-flops", "0.5", "--out", tmp_path / "half", "--json")
    data = json.loads(done(prune(own, *arguments, model=model)))
    names: dict = {}
    exec("\n".join(data["load"]), names)
    assert names["small"][0].out_features == data["groups"]["0"]["after"]
    monkeypatch.chdir(own.parent)
    arguments = ["prune", f"mine:{model}", "--data", "mine:both", "--keep-flops", "0.5", "--json"]
    data = json.loads(done(RUN.invoke(app, [*arguments, "--out", str(tmp_path / "half")])))
    monkeypatch.syspath_prepend(own.parent)
    exec("\n".join(data["load"]), names)
    assert names["small"][0].out_features == data["groups"]["0"]["after"]


def test_held_out_data_are_evaluated_before_and_after(half, own):
    text, out = half
    settings = read_run(out).settings
    before, after = settings["evaluation"]["before"], settings["evaluation"]["after"]
    assert before["count"] == after["count"] == 16
    assert "on 16 samples held out" in text
    small = ap.load(out, dense=torch_dense(own))
    names: dict = {}
    exec(own.read_text(), names)
    batches = names["batches"](2)
    with torch.no_grad():
        losses = [float(torch.nn.functional.cross_entropy(small(x), y)) for x, y in batches]
    assert after["loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert settings["subject"]["seed"] == 0


def test_without_held_out_data_the_scoring_data_judge_and_this_is_said(own, tmp_path):
    text = done(prune(own, "--keep-flops", "0.5", "--out", tmp_path / "half", data="batches"))
    assert "held out" not in text
    assert "on the scoring data" in text
    run = read_run(tmp_path / "half")
    assert run.settings["evaluation"]["on"] == "scoring data"
    assert run.settings["evaluation"]["before"]["loss"] == pytest.approx(run.history[0].loss)


def test_without_labels_nothing_is_evaluated(own, tmp_path):
    arguments = ("--keep-flops", "0.5", "--criterion", "magnitude", "--out", tmp_path / "half")
    text = done(prune(own, *arguments, data="without_labels"))
    assert "scoring data" not in text
    assert read_run(tmp_path / "half").settings["evaluation"]["after"] is None


def test_a_loss_that_is_no_number_is_shown_and_the_result_saved(own, tmp_path):
    arguments = ("--keep-flops", "0.5", "--out", tmp_path / "half")
    text = done(prune(own, *arguments, data="not_a_number"))
    assert ["loss", "nan", "nan"] in [line.split() for line in text.splitlines()]
    data = json.loads(done(prune(own, *arguments, "--json", data="not_a_number")))
    assert data["evaluation"]["after"]["loss"] is None


def test_json_alone_is_printed_and_another_run_agrees(own, tmp_path, half):
    found = []
    for name in ("one", "two"):
        result = prune(own, "--keep-flops", "0.5", "--out", tmp_path / name, "--json")
        data = json.loads(done(result))
        found.append([data["groups"], data["spent"], data["evaluation"], data["delivery"]])
        assert [step["step"] for step in data["steps"]] == [1, 2]
        assert data["saved"] == str(tmp_path / name)
    assert found[0] == found[1]


def test_the_next_command_can_be_typed(own, tmp_path):
    arguments = ("--keep-flops", "0.5", "--name", "!3", "--out", tmp_path / "half", "--json")
    arguments = (*arguments, "--repair", "none")
    seen = []
    data = json.loads(done(prune(own, *arguments)))
    for _ in range(2):
        command = shlex.split(data["next"])
        seen.append(data["next"])
        data = json.loads(done(RUN.invoke(app, [*command[1:], "--json"])))
    assert "--repair refit" in seen[0]
    assert "--criterion magnitude-l2" in seen[1]
    assert data["groups"]["3"]["after"] == 12, "every option is carried along"
    assert data["settings"]["repair"] == ["refit(scope='every', ridge=None, rounds=3)"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "half",
        "half-repaired",
        "half-repaired-magnitude-l2",
    ]


def widths(own, tmp_path, *arguments, keep="--keep-flops 0.6"):
    result = prune(own, *keep.split(), *arguments, "--out", tmp_path / "w", "--json")
    return {name: own["after"] for name, own in json.loads(done(result))["groups"].items()}


def test_names_choose_and_protect(own, tmp_path):
    assert widths(own, tmp_path, "--name", "!0")["0"] == 16
    assert widths(own, tmp_path, "--name", "0")["3"] == 12
    assert widths(own, tmp_path, "--kind", "hidden") == widths(own, tmp_path)


def test_widths_are_uniform_rounded_and_bounded(own, tmp_path):
    uniform = widths(own, tmp_path, "--widths", "uniform", keep="--keep-units 0.5")
    assert uniform == {"0": 8, "3": 6}
    assert all(w % 4 == 0 for w in widths(own, tmp_path, "--round-to", "4").values())
    assert min(widths(own, tmp_path, "--floor", "7", keep="--keep-units 0.55").values()) >= 7
    capped = widths(own, tmp_path, "--cap", "0.45", keep="--keep-units 0.6")
    assert capped["0"] >= 9
    assert capped["3"] >= 7


def test_other_choices_reach_the_library(own, tmp_path):
    options = ["--per", "cost", "--criterion", "taylor", "--aggregation", "paper", "--samples", "5"]
    out = tmp_path / "w"
    done(prune(own, "--keep-params", "0.6", *options, "--batch-size", "2", "--out", out))
    run = read_run(out)
    assert run.settings["criterion"] == "taylor"
    assert run.settings["selection"]["per"] == "cost"
    assert run.settings["aggregation"]["normalise"] == "max"
    assert run.settings["budget"] == {"params": 0.6}
    assert [step.count for step in run.history] == [5, 5]


def test_a_task_of_ones_own_is_used(own, tmp_path):
    text = done(prune(own, "--keep-flops", "0.6", "--out", tmp_path / "w", data="squares"))
    assert "obs was not used, though it is the default" in text  # it shows no predictions
    assert UNREPAIRED not in text
    names: dict = {}
    exec(own.read_text(), names)
    loss = torch.nn.functional.mse_loss(names["make"]().eval()(torch.ones(8, 4)), torch.ones(8, 3))
    assert read_run(tmp_path / "w").history[0].loss == pytest.approx(float(loss.detach()), rel=1e-5)


def test_a_program_is_delivered_with_its_reason(own, tmp_path):
    arguments = ("--keep-flops", "0.5", "--steps", "1", "--out", tmp_path / "w")
    text = done(prune(own, *arguments, model="mean_of_hidden"))
    assert "Delivered as a program, because" in text
    assert UNREPAIRED not in text  # a program has no layers to refit


def test_a_dry_run_scores_and_writes_nothing(own, tmp_path, monkeypatch):
    monkeypatch.setattr(apoptosis.cli.prune, "prune", lambda *_, **__: pytest.fail("scored"))
    out = tmp_path / "half"
    text = " ".join(done(prune(own, "--keep-flops", "0.5", "--dry-run", "--out", out)).split())
    assert "2 scoring passes over 3 batches each, 6 in all" in text
    assert str(out) in text.replace(" ", "")
    data = json.loads(done(prune(own, "--keep-flops", "0.5", "--dry-run", "--json", "--out", out)))
    assert data["asked"] == {"flops": 0.5}
    assert data["lowest"]["units"] == pytest.approx(2 / 28)
    assert data["groups"] == {"0": 16, "3": 12}
    gathered = (
        "--keep-flops",
        "0.5",
        "--dry-run",
        "--json",
        "--aggregation",
        "paper",
        "--out",
        out,
    )
    assert json.loads(done(prune(own, *gathered)))["criterion"] == "oba"
    free = ("--keep-flops", "0.5", "--dry-run", "--criterion", "magnitude")
    assert "reads no data" in done(prune(own, *free, "--out", out))
    assert not out.exists()


def test_the_place_of_the_result_has_a_name_of_its_own(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SOURCE)
    arguments = ["prune", "mine.py:make", "--data", "mine.py:both", "--steps", "1"]
    arguments += ["--keep-flops", "0.5", "--criterion", "magnitude"]
    name = "mine.py-make-magnitude-flops0.5"
    for num, widths in ((1, "global"), (2, "uniform"), (3, "global")):
        text = done(RUN.invoke(app, [*arguments, "--widths", widths]))
        place = tmp_path / "runs" / (name if num == 1 else f"{name}-{num}")
        assert f"Saved: runs/{place.name}\n" in text
        assert "in 1 step, which" in text
        assert "Replaced" not in text
        assert "--out" not in text, "the next run finds a name of its own"
        assert read_run(place).settings["selection"]["widths"] == widths
    dry = done(RUN.invoke(app, [*arguments, "--dry-run"]))
    assert f"saved in runs/{name}-4" in dry
    assert "Next:" not in dry
    assert read_run(tmp_path / "runs" / name).settings["selection"]["widths"] == "global"
    assert len(list((tmp_path / "runs").iterdir())) == 3


def test_the_network_of_the_digits_is_trained_first_and_this_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(apoptosis.cli.subject, "EPOCHS", 1)
    arguments = ["prune", "digits_cnn", "--data", "digits", "--keep-flops", "0.7", "--steps", "1"]
    result = RUN.invoke(app, [*arguments, "--json", "--out", str(tmp_path / "d")])
    data = json.loads(done(result))
    assert "training it on the digits for 1 epoch first" in result.stderr
    assert data["evaluation"]["before"]["metrics"]["correct"] > 0.5
    assert data["evaluation"]["before"]["count"] == 300
    assert "random weights" not in result.stderr


def test_weights_are_used_and_the_digits_then_not_trained(tmp_path, monkeypatch):
    from apoptosis.models import digits_cnn

    monkeypatch.setattr(apoptosis.cli.subject, "fit_", lambda *_: pytest.fail("trained"))
    model = digits_cnn(seed=5)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    arguments = ["prune", "digits_cnn", "--data", "digits", "--keep-flops", "0.999", "--steps", "1"]
    more = ["--criterion", "magnitude", "--weights", str(tmp_path / "w.safetensors")]
    done(RUN.invoke(app, [*arguments, *more, "--out", str(tmp_path / "d")]))
    small = ap.load(tmp_path / "d", dense=digits_cnn)
    torch.testing.assert_close(small.head.bias, model.head.bias, rtol=0, atol=0)


def test_an_untrained_library_model_is_remarked_on_unless_there_is_an_error(own):
    arguments = ["prune", "mlp", "--keep-flops", "0.5", "--dry-run", "--data"]
    result = RUN.invoke(app, [*arguments, f"{own}:images"])
    done(result)
    assert "mlp has random weights" in result.stderr
    for data in ("digts", "digits"):
        found = refused(RUN.invoke(app, [*arguments, data]), "DataError")
        assert "randomweights" not in found


UNREPAIRED = "--repair refit gives its layers new weights by least squares, without labels."


def test_a_network_that_nothing_has_mended_is_remarked_on(half, own, tmp_path):
    assert UNREPAIRED not in half[0]  # refitted unless said otherwise
    assert "was not used" not in half[0]
    arguments = ("--keep-flops", "0.5", "--out", tmp_path / "half")
    assert done(prune(own, *arguments, "--repair", "none")).count(UNREPAIRED) == 1
    assert done(prune(own, *arguments, "--criterion", "oba")).count(UNREPAIRED) == 1
    assert UNREPAIRED not in done(prune(own, *arguments, "--repair", "batch_norm"))
    assert UNREPAIRED not in done(prune(own, *arguments, "--epochs", "1"))


def test_repairs_are_asked_for_by_name_one_after_the_other(own, tmp_path):
    arguments = ("--keep-flops", "0.5", "--repair", "refit", "--repair", "distil", "--json")
    found = prune(own, *arguments, "--out", tmp_path / "half")
    data = json.loads(done(found))
    names = [
        "refit(scope='every', ridge=None, rounds=3)",
        "distil(steps=300, learning_rate=0.001, temperature=inf, seed=0)",
    ]
    assert data["settings"]["repair"] == names
    assert UNREPAIRED not in found.stderr


HEADS = """
import torch
from torch import nn
from apoptosis.models import ViTOptions, vit

def own():
    torch.manual_seed(0)
    sizes = dict(image_size=8, patch_size=4, width=12, depth=2, num_heads=2, num_classes=3)
    return vit(ViTOptions(**sizes))

def torchs():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Conv2d(3, 12, 4, 4), nn.Flatten(2), Turned(), encoder, nn.Flatten(), nn.Linear(48, 3))

class Turned(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x):
        q, k, v = (own(x).view(len(x), -1, 2, 6).transpose(1, 2) for own in (self.q, self.k, self.v))
        mixed = (q @ k.mT / 6**0.5).softmax(-1) @ v
        return x + self.o(mixed.transpose(1, 2).flatten(2))

def written():
    torch.manual_seed(0)
    hidden = nn.Linear(12, 96), nn.ReLU(), nn.Linear(96, 12)
    layers = nn.Conv2d(3, 12, 4, 4), nn.Flatten(2), Turned(), Attention(), *hidden
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(48, 3))

def images():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 3, 8, 8, generator=generator), torch.zeros(8).long()) for _ in range(2)]
"""


def test_heads_are_aligned_unless_that_is_refused_and_tables_say_so(tmp_path, monkeypatch):
    (tmp_path / "heads.py").write_text(HEADS)
    monkeypatch.chdir(tmp_path)
    data = ("--data", "heads.py:images", "--keep-flops", "0.7", "--repair", "none")
    said = "Heads were aligned first: 4 groups of their dimensions."

    def run(*words):
        return done(RUN.invoke(app, ["prune", "heads.py:own", *data, *map(str, words)]))

    assert said in run("--out", "unsaid")
    assert "aligned" not in run("--out", "refused", "--no-align")
    assert said in run("--out", "others", "--criterion", "magnitude-l2", "--align")
    assert "by obs in 1 step, its heads aligned first. Nothing" in run("--dry-run")
    assert "aligned" not in run("--dry-run", "--no-align")
    assert json.loads(run("--dry-run", "--json"))["align"] is True
    assert json.loads(run("--out", "told", "--json"))["settings"]["align"] is True


def test_heads_that_are_spared_for_a_refit_are_told(tmp_path, monkeypatch):
    (tmp_path / "heads.py").write_text(HEADS)
    monkeypatch.chdir(tmp_path)
    words = ["--data", "heads.py:images", "--keep-flops", "0.6", "--out", "x"]
    found = done(RUN.invoke(app, ["prune", "heads.py:written", *words]))
    (line,) = [own for own in found.splitlines() if own.startswith("Groups of the kinds qk_dim")]
    assert "stay whole: the network would become a program, which nothing mends, because" in line
    assert "Not mended" not in found


def test_groups_left_alone_for_one_reason_are_one_line(tmp_path, monkeypatch):
    (tmp_path / "heads.py").write_text(HEADS)
    monkeypatch.chdir(tmp_path)
    words = ["--data", "heads.py:images", "--keep-flops", "0.8", "--repair", "none", "--out", "x"]
    words += ["--criterion", "magnitude-l2", "--align"]
    found = done(RUN.invoke(app, ["prune", "heads.py:torchs", *words]))
    (line,) = [own for own in found.splitlines() if own.startswith("Not aligned")]
    assert "head_dim and 1 other, because no module shows the output of" in line


def test_where_nothing_was_removed_nothing_follows(own, tmp_path):
    arguments = ("--keep-flops", "1", "--out", tmp_path / "whole")
    text = done(prune(own, *arguments))
    assert "Next:" not in text
    assert UNREPAIRED not in text
    assert json.loads(done(prune(own, *arguments, "--json")))["next"] is None


def test_per_cent_are_answered_with_how_they_are_written(own):
    for option in ("--keep-flops", "--keep-params", "--keep-units", "--cap"):
        result = prune(own, option, "50%")
        assert result.exit_code == 2
        assert "50 % is written 0.5" in result.stderr
    assert "'half' is no number" in prune(own, "--keep-flops", "half").stderr


ERRORS = {
    "flops 0": (
        ["--keep-flops", "0"],
        "ConfigError",
        "--keep-flops 0.0 was asked for. It is the share",
    ),
    "flops 50": (["--keep-flops", "50"], "ConfigError", "For 50 % write --keep-flops 0.5"),
    "flops 1.5": (["--keep-flops", "1.5"], "ConfigError", "For 1.5 % write --keep-flops 0.015"),
    "params nan": (["--keep-params", "nan"], "ConfigError", "--keep-params nan was asked for"),
    "no budget": ([], "ConfigError", "Say what may stay: --keep-flops 0.5, --keep-params 0.5"),
    "either kind": ([], "ConfigError", "or, of single weights, --unstructured --keep 0.1"),
    "cap": (["--keep-flops", "0.5", "--cap", "2"], "ConfigError", "--cap 2.0 was asked for"),
    "unreachable": (
        ["--keep-units", "0.01"],
        "BudgetError",
        "The nearest that can be reached: --keep-units 0.0715",
    ),
    "hindered": (
        ["--keep-units", "0.1", "--floor", "4"],
        "BudgetError",
        "In the way: --floor 4; without, --keep-units 0.07143 can be reached",
    ),
    "criterion": (
        ["--keep-flops", "0.5", "--criterion", "obaa"],
        "ConfigError",
        "There is no criterion 'obaa'. Did you mean 'oba'? There are oba,",
    ),
    "aggregation": (
        ["--keep-flops", "0.5", "--aggregation", "papr"],
        "ConfigError",
        "There is no aggregation 'papr'. Did you mean 'paper'?",
    ),
    "repair": (
        ["--keep-flops", "0.5", "--repair", "batchnorm"],
        "ConfigError",
        "Did you mean 'batch_norm'? There are batch_norm, refit, refit_blocks, distil, none.",
    ),
    "widths": (
        ["--keep-flops", "0.5", "--widths", "gobal"],
        "ConfigError",
        "There is no --widths 'gobal'. Did you mean 'global'? There are global, uniform.",
    ),
    "per": (
        ["--keep-flops", "0.5", "--per", "costs"],
        "ConfigError",
        "There is no --per 'costs'. Did you mean 'cost'? There are unit, cost.",
    ),
    "kind": (
        ["--keep-flops", "0.5", "--kind", "chanel"],
        "ConfigError",
        "There is no kind 'chanel'. Did you mean 'channel'?",
    ),
    "repairs": (
        ["--keep-flops", "0.5", "--repair", "refit", "--repair", "batch_norm"],
        "ConfigError",
        "Put 'batch_norm' before 'refit', or leave it out.",
    ),
    "name": (["--keep-flops", "0.5", "--name", "layer*"], "ConfigError", "'layer*'"),
    "device": (
        ["--keep-flops", "0.5", "--device", "tpuu"],
        "ConfigError",
        "--device tpuu is none that commands run on. Say cpu",
    ),
    "weights": (
        ["--keep-flops", "0.5", "--weights", "nowhere.safetensors"],
        "CheckpointError",
        "nowhere.safetensors: it does not exist",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_fit_on_a_screen_and_say_what_to_do(own, tmp_path, name):
    arguments, kind, message = ERRORS[name]
    found = refused(prune(own, *arguments, "--out", tmp_path / "half"), kind)
    assert unboxed(message) in found
    assert not list(tmp_path.iterdir())


MISFITS = {
    "inputs": ("make", "wide", "does not run on a batch of inputs of shape (8, 5)"),
    "known inputs": ("with_inputs", "wide", "(it is known to take (1, 4))"),
    "labels": ("make", "many_classes", "the loss of outputs of shape (8, 3) cannot be taken"),
    "classes": (
        "make",
        "many_classes",
        "Labels go up to 7, and the model has outputs for 3 classes",
    ),
    "evaluation": ("make", "bad_evaluation", "does not run on a batch of inputs of shape (8, 5)"),
    "reading": ("make", "breaks_later", "failed with KeyError: 'image 17'. At"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_model_and_data_that_do_not_fit_are_told_in_words(own, tmp_path, name):
    model, data, message = MISFITS[name]
    arguments = ("--keep-flops", "0.5", "--out", tmp_path / "half")
    found = refused(prune(own, *arguments, model=model, data=data), "DataError")
    assert unboxed(message) in found
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("num", "message"), [(0, "finds no CUDA device"), (2, "finds 2 CUDA devices, counted from 0")]
)
def test_a_gpu_that_is_not_there_is_refused(own, monkeypatch, num, message):
    monkeypatch.setattr("torch.cuda.device_count", lambda: num)
    result = prune(own, "--keep-flops", "0.5", "--device", "cuda:2")
    assert unboxed(message) in refused(result, "ConfigError")


@pytest.mark.parametrize("name", ["meta", "mps"])
def test_devices_that_torch_knows_and_commands_do_not_run_on_are_refused(own, tmp_path, name):
    result = prune(own, "--keep-flops", "0.5", "--device", name, "--out", tmp_path / "half")
    assert unboxed(f"--device {name} is none that") in refused(result, "ConfigError")
    assert not list(tmp_path.iterdir())


def test_a_model_with_nothing_to_score_or_to_cut_is_refused(own, tmp_path):
    arguments = ("--keep-flops", "0.5", "--out", tmp_path / "half")
    by_oba = ("--criterion", "oba")
    found = refused(prune(own, *arguments, *by_oba, model="frozen"), "ModelError")
    assert "requiresgrad" in found
    found = refused(prune(own, *arguments, model="one_layer"), "ConfigError")
    assert unboxed("No group is chosen") in found


def test_unknown_models_and_data_are_refused(own):
    result = RUN.invoke(app, ["prune", "digit_cnn", "--data", "digits", "--keep-flops", "0.5"])
    assert unboxed("no model 'digit_cnn'. Did you mean 'digits_cnn'?") in refused(
        result, "ConfigError"
    )
    result = RUN.invoke(app, ["prune", f"{own}:make", "--data", "digit", "--keep-flops", "0.5"])
    assert unboxed("no data 'digit'. Did you mean 'digits'?") in refused(result, "DataError")


def test_networks_and_digits_of_another_size_do_not_fit():
    result = RUN.invoke(app, ["prune", "mlp", "--data", "digits", "--keep-flops", "0.5"])
    found = refused(result, "DataError")
    assert unboxed("inputs of shape (400, 1, 8, 8) (it is known to take (1, 1, 28, 28))") in found


def test_a_place_that_holds_something_else_is_refused_before_the_work(own, tmp_path, monkeypatch):
    monkeypatch.setattr(apoptosis.cli.prune, "find_subject", lambda *_: pytest.fail("worked first"))
    (tmp_path / "thesis.tex").write_text("years of work")
    for out, message in (
        (tmp_path, "holds 'thesis.tex': it is no checkpoint"),
        (tmp_path / "thesis.tex", "is a file; a checkpoint is a folder"),
        (tmp_path / "thesis.tex" / "below" / "half", "thesis.tex is a file. Give another place"),
    ):
        result = prune(own, "--keep-flops", "0.5", "--out", out)
        assert unboxed(message) in refused(result, "CheckpointError")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_place_that_may_not_be_written_to_is_refused(own, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "os.access", lambda *_: False
    )  # tests may run as a user who may do anything
    result = prune(own, "--keep-flops", "0.5", "--out", tmp_path / "half")
    assert unboxed("may not be written to. Give another place") in refused(
        result, "CheckpointError"
    )


def test_a_checkpoint_is_replaced(own, tmp_path):
    said = f"Replaced the earlier checkpoint in {tmp_path / 'half'}"
    (tmp_path / "half").mkdir()
    for share in ("0.5", "0.7"):
        text = done(prune(own, "--keep-flops", share, "--out", tmp_path / "half"))
        assert (said in text) == (share == "0.7")
    assert read_run(tmp_path / "half").settings["budget"] == {"flops": 0.7}


def test_ctrl_c_leaves_nothing_behind(own, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(apoptosis.cli.prune, "prune", interrupted)
    result = prune(own, "--keep-flops", "0.5", "--out", tmp_path / "runs" / "half")
    assert result.exit_code == 130
    assert "Stopped." in result.stderr
    assert result.stdout == ""
    assert not list((tmp_path / "runs").iterdir())


def test_the_state_of_random_numbers_is_left_alone(own, tmp_path):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    done(prune(own, "--keep-flops", "0.5", "--out", tmp_path / "half", "--seed", "9"))
    assert torch.equal(torch.get_rng_state(), before)


def test_no_data_is_wrong_usage():
    assert RUN.invoke(app, ["prune", "digits_cnn", "--keep-flops", "0.5"]).exit_code == 2


@pytest.mark.parametrize("option", ["--criterion", "--widths", "--per", "--kind", "--repair"])
def test_names_are_looked_up_before_any_work(own, monkeypatch, option):
    monkeypatch.setattr(apoptosis.cli.prune, "find_subject", lambda *_: pytest.fail("worked first"))
    assert "Thereisno" in refused(prune(own, "--keep-flops", "0.5", option, "x"), "ConfigError")
