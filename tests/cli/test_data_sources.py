import pytest
import torch

from apoptosis.cli.data_sources import Reading, find_data
from apoptosis.data import cifar10
from apoptosis.errors import ConfigError, DataError
from apoptosis.task import Task
from oracles.cifar_fakes import arrays, write
from oracles.image_fakes import write_classes

SOURCE = """
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from apoptosis import Task
from apoptosis.data import Batches, digits

X, Y = torch.arange(10.0).view(10, 1), torch.arange(10) % 3
TASK = Task.language_model()
READ = []

def as_list():
    return [(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])]

def loader():
    return DataLoader(TensorDataset(X, Y), batch_size=4)

def pair():
    return as_list(), loader()

def triple():
    return [torch.zeros(2, 5, dtype=torch.int64)], None, TASK

def batches_and_task():
    return [torch.zeros(2, 5, dtype=torch.int64)], TASK

def single():
    return (as_list(),)

def dicts():
    return [{"x": X, "labels": Y}]

def counted():
    class Counted:
        def __iter__(self):
            READ.append(1)
            return iter(as_list())
    return Counted()

def stream():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(zip(X, Y))
    return DataLoader(Stream(), batch_size=4)

def nothing():
    as_list()

def generator():
    yield from as_list()

def one_shot():
    return iter(as_list())

def empty():
    return []

def a_batch():
    return X, Y

def a_tensor():
    return X

def a_dict():
    return {"x": X}

def a_dataset():
    class Images(Dataset):
        def __getitem__(self, place):
            return X[place], Y[place]
    return Images()

def texts():
    return ["a", "b"]

def four():
    return as_list(), as_list(), TASK, 1

def no_task():
    return as_list(), as_list(), "classification"

def empty_evaluation():
    return as_list(), []

def shot_evaluation():
    return as_list(), iter(as_list())

def fails():
    raise FileNotFoundError("no images here")

def needs(folder):
    return as_list()

def by_purpose():
    halves = [(X[:5], Y[:5]), (X[5:], Y[5:])]
    return {"scoring": loader(), "training": halves, "validation": [(X[:2], Y[:2])], "test": [(X[:1], Y[:1])],
            "task": TASK}

def training_only():
    return {"training": [(X[:5], Y[:5]), (X[5:], Y[5:])], "validation": None}

def passes():
    return {"scoring": as_list(), "training": Batches(X, Y, size=4, shuffle_seed=0)}

def misspelt():
    return {"scoring": as_list(), "trainin": as_list()}

def both():
    return {"scoring": as_list(), "test": as_list(), "evaluation": as_list()}

def no_scoring():
    return {"evaluation": as_list()}

def empty_dict():
    return {}

def empty_training():
    return {"scoring": as_list(), "training": []}

def shot_validation():
    return {"scoring": as_list(), "validation": iter(as_list())}

def task_alone():
    return {"scoring": as_list(), "task": [1]}

def data_set():
    return digits(num_validation=0)

def broken_loader():
    class Broken(Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, place):
            raise ValueError(f"image {place} is damaged")
    return DataLoader(Broken(), batch_size=2)
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(SOURCE)
    return path


def sizes(batches):
    return [len(labels) for _, labels in batches]


def test_the_digits_are_scored_on_training_and_evaluated_on_test_images():
    data = find_data("digits", Reading(samples=100, batch_size=30))
    assert sizes(data.scoring) == [30, 30, 30, 10]
    assert sum(sizes(data.evaluation)) == 300
    assert sum(sizes(data.training)) == 1200, "training is not what --samples is about"
    other = find_data("digits", Reading(samples=100, seed=1))
    assert not torch.equal(next(iter(other.scoring))[0], next(iter(data.scoring))[0])


@pytest.mark.parametrize("name", ["as_list", "loader", "pair", "single", "stream"])
def test_batches_are_found_and_can_be_read_again(own, name):
    data = find_data(f"{own}:{name}", Reading())
    for _ in range(2):
        assert sizes(data.scoring) == [4, 4, 2]
        torch.testing.assert_close(
            torch.cat([x for x, _ in data.scoring]).flatten(), torch.arange(10.0)
        )
    assert (data.evaluation is not None) == (name == "pair")
    assert sizes(data.training) == sizes(data.scoring), "what is scored can be trained on"
    assert hasattr(data.scoring, "__len__") == (name != "stream")
    assert name == "stream" or len(data.scoring) == 3


def test_a_task_comes_as_the_third(own):
    data = find_data(f"{own}:triple", Reading())
    assert isinstance(data.task, Task)
    assert data.task.count(next(iter(data.scoring))) == 8
    assert data.evaluation is None


def test_a_task_may_come_without_batches_to_judge_on(own):
    found = find_data(f"{own}:batches_and_task", Reading())
    assert found.evaluation is None
    assert found.task.count(torch.zeros(2, 5, dtype=torch.int64)) == 8


def test_batches_are_split_into_smaller_ones(own):
    data = find_data(f"{own}:pair", Reading(batch_size=3))
    assert sizes(data.scoring) == sizes(data.evaluation) == [3, 1, 3, 1, 2]


def test_so_many_samples_are_read_once_and_kept(own):
    data = find_data(f"{own}:pair", Reading(samples=6))
    assert sizes(data.scoring) == [4, 2]
    assert sizes(data.evaluation) == [4, 4, 2], "all are evaluated"
    assert sizes(find_data(f"{own}:loader", Reading(samples=99)).scoring) == [4, 4, 2]
    (batch,) = find_data(f"{own}:dicts", Reading(samples=3)).scoring
    assert batch["x"].shape == (3, 1)


def test_tensors_go_to_the_device(own):
    for name in ("as_list", "dicts", "triple"):
        data = find_data(f"{own}:{name}", Reading(device=torch.device("meta")))
        batch = next(iter(data.scoring))
        tensors = batch.values() if isinstance(batch, dict) else batch
        assert all(tensor.is_meta for tensor in tensors)


REFUSED = {
    "nothing": "returned nothing. End the function with `return batches`",
    "generator": "gave a generator, which can be read only once",
    "one_shot": "gave a list_iterator, which can be read only once",
    "empty": "has no batches. Give at least one",
    "a_batch": "gave a Tensor where batches were expected",
    "a_tensor": "gave a Tensor where batches were expected",
    "a_dict": "gave a dict with the key 'x'. Keys are scoring, training",
    "a_dataset": "gave a Images where batches were expected",
    "texts": "is a str without any tensor",
    "four": "gave a tuple of 4",
    "no_task": "gave as the task is a str. It is the Task",
    "empty_evaluation": "evaluation has no batches",
    "shot_evaluation": "evaluation gave a list_iterator",
    "broken_loader": "failed with ValueError: image 0 is damaged. At .*mine.py:",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_are_no_batches_is_refused_with_what_to_return(own, name):
    with pytest.raises(DataError, match=REFUSED[name]):
        find_data(f"{own}:{name}", Reading())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails", "failed with FileNotFoundError: no images here. At .*mine.py:"),
        ("needs", "needs arguments: folder.*returns batches"),
        ("none", "has no function 'none'. It has as_list"),
    ],
)
def test_a_function_that_cannot_be_called_is_told(own, name, message):
    with pytest.raises(ConfigError, match=message):
        find_data(f"{own}:{name}", Reading())


@pytest.mark.parametrize("name", ["digit", "cifar", ":", "mine:", "", "some/where"])
def test_unknown_data_are_refused(name):
    with pytest.raises(DataError, match="There are no data .* Known are digits, cifar10, cifar100"):
        find_data(name, Reading())


def test_a_file_without_its_function_is_asked_for_it(own):
    with pytest.raises(ConfigError, match="Say which function: .*mine.py:as_list"):
        find_data(str(own), Reading())


# -- dicts ------------------------------------------------------------------------------------------------------------


def test_a_dict_names_batches_for_each_purpose(own):
    data = find_data(f"{own}:by_purpose", Reading(batch_size=3))
    assert sizes(data.scoring) == [3, 1, 3, 1, 2]
    assert sizes(data.training) == [5, 5], "pieces would train another network"
    assert sizes(data.validation) == [2]
    assert sizes(data.evaluation) == [1], "given as test"
    assert data.task.count(torch.zeros(2, 5, dtype=torch.int64)) == 8


def test_scoring_and_training_stand_in_for_each_other(own):
    data = find_data(f"{own}:training_only", Reading(samples=4))
    assert sizes(data.scoring) == [4]
    assert sizes(data.training) == [5, 5]
    assert data.validation is None
    assert data.evaluation is None


def test_passes_can_be_set_where_the_batches_can(own):
    data = find_data(f"{own}:passes", Reading())
    first, _ = (torch.cat([y for _, y in data.training]).tolist() for _ in range(2))
    data.training.start_at(0)
    assert torch.cat([y for _, y in data.training]).tolist() == first
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    assert first == (order % 3).tolist(), "checking the first batch was no pass"
    assert not hasattr(data.scoring, "start_at")


DICTS = {
    "misspelt": "the key 'trainin'. Did you mean 'training'\\?",
    "both": "both 'test' and 'evaluation'",
    "no_scoring": "nothing to score or train on; found evaluation",
    "empty_dict": "nothing to score or train on; found nothing",
    "empty_training": "training has no batches",
    "shot_validation": "validation gave a list_iterator",
    "task_alone": "gave as the task is a list",
}


@pytest.mark.parametrize("name", DICTS)
def test_wrong_dicts_are_refused(own, name):
    with pytest.raises(DataError, match=DICTS[name]):
        find_data(f"{own}:{name}", Reading())


# -- data sets --------------------------------------------------------------------------------------------------------


def test_cifar_is_trained_with_augmentation_and_judged_without(tmp_path):
    path = write(tmp_path, "cifar10", "npz", arrays("cifar10", 100))
    data = find_data(f"cifar10:{path}", Reading(samples=30, batch_size=20, training_batch_size=90))
    assert sizes(data.scoring) == [20, 10]
    assert sizes(data.validation) == [10]
    assert sizes(data.evaluation) == [8]
    (trained, labels), *_ = data.training
    plain = cifar10(path, num_validation=10).train
    (images, _), *_ = plain.batches(90, shuffle_seed=0)
    assert len(labels) == 90
    assert not torch.equal(trained, images), "moved and mirrored"
    assert torch.equal(
        torch.cat([x for x, _ in data.scoring]), next(iter(plain.first(30).batches(30)))[0]
    )
    assert data.num_classes == 10


def test_images_are_found_by_their_path(tmp_path):
    write_classes(tmp_path / "pets", {"a": 10, "b": 10})
    data = find_data(str(tmp_path / "pets"), Reading(samples=3, training_batch_size=4))
    assert next(iter(data.scoring))[0].shape == (3, 3, 224, 224)
    assert next(iter(data.training))[0].shape == (4, 3, 224, 224)
    assert sizes(data.validation) == sizes(data.evaluation) == [2]


def test_a_function_may_return_a_data_set(own):
    data = find_data(f"{own}:data_set", Reading())
    assert sum(sizes(data.training)) == 1797 - 300
    assert data.validation is None
    assert data.num_classes == 10


@pytest.mark.parametrize("name", ["d/gone.npz", "gone.zip", "d/images"])
def test_a_path_that_leads_nowhere_is_called_missing(name):
    with pytest.raises(DataError, match=f"no data '{name}': there is no such file or folder"):
        find_data(name, Reading())
