"""Tasks with one mistake each, as a newcomer makes them."""

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from tpukit.train.task import Datasets, Task, TrainingDefaults, stack_samples


class Rows:
    """`count` samples of a function of the index."""

    def __init__(self, make, count=16):
        self.make, self.count = make, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.make(index)


def sample(index, kind=np.float32):
    return {"x": np.full(4, index, kind), "y": np.zeros(2, kind)}


class Sound(Task):
    """Without a mistake; it says nothing of `probe_batches`."""

    defaults = TrainingDefaults(global_batch_size=8, max_steps=2)
    make = staticmethod(sample)

    def __init__(self, data_path=""):
        pass

    def build_model(self, ops):
        return nn.Linear(4, 2)

    def datasets(self):
        return Datasets(Rows(self.make), None)

    def loss(self, model, batch):
        return {"loss": (model(batch["x"]) - batch["y"]).square().mean(1)}


# -- what methods return -----------------------------------------------------------------------
class BareTensor(Sound):
    def loss(self, model, batch):
        return super().loss(model, batch)["loss"].mean()


class Number(Sound):
    def loss(self, model, batch):
        return super().loss(model, batch)["loss"].mean().item()


class WithoutKey(Sound):
    def loss(self, model, batch):
        return {"error": super().loss(model, batch)["loss"]}


class MatrixLoss(Sound):
    def loss(self, model, batch):
        return {"loss": (model(batch["x"]) - batch["y"]).square()}


class FewRows(Sound):
    def loss(self, model, batch):
        return {"loss": super().loss(model, batch)["loss"][:1]}


class Detached(Sound):
    def loss(self, model, batch):
        return {"loss": torch.tensor(super().loss(model, batch)["loss"].mean().item())}


class NumberBesideIt(Sound):
    def loss(self, model, batch):
        loss = super().loss(model, batch)["loss"]
        return {"loss": loss, "worst": loss.max().item()}


class OtherWeight(Sound):
    def loss(self, model, batch):
        return {**super().loss(model, batch), "weight": batch["mask"].sum()}


class WithoutMask(Sound):
    """Without a mistake: the engine makes the mask."""

    def collate(self, samples, micro):
        batch = stack_samples(samples, micro.rows)
        return {"x": batch["x"], "y": batch["y"]}


class ShortBatch(Sound):
    def collate(self, samples, micro):
        return stack_samples(samples[:3], 3)


class Pair(Sound):
    def datasets(self):
        return Rows(sample), Rows(sample)


class Empty(Sound):
    def datasets(self):
        return Datasets(Rows(sample, 0), None)


class EmptyValidation(Sound):
    def datasets(self):
        return Datasets(Rows(sample), Rows(sample, 0))


class SparseGradients(Sound):
    def build_model(self, ops):
        return nn.Sequential(nn.Linear(4, 2), nn.Embedding(2, 2, sparse=True))


class Kept(nn.Linear):
    """Layers where nothing finds them."""

    def __init__(self, kept):
        super().__init__(4, 2)
        self.kept = kept


class InAList(Sound):
    def build_model(self, ops):
        return nn.Sequential(Kept([nn.Parameter(torch.ones(2))]))


class InADict(Sound):
    def build_model(self, ops):
        return Kept({"head": nn.Linear(2, 2)})


class Lazy(Sound):
    def build_model(self, ops):
        return nn.Sequential(nn.LazyLinear(2))


class WithoutReturn(Sound):
    def build_model(self, ops):
        nn.Linear(4, 2)


class TwoLengths(Sound):
    """Without a mistake: every other step's batches are twice as long."""

    def plan(self, data, settings):
        shuffled = super().plan(data, settings)
        step = shuffled.step
        shuffled.step = lambda n: [replace(micro, shape=4 + 4 * (n % 2)) for micro in step(n)]
        return shuffled

    def collate(self, samples, micro):
        return stack_samples([{"x": np.resize(s["x"], micro.shape)} for s in samples], micro.rows)


class OneLong(Sound):
    """Without a mistake: padded to the longest, and one of 900 samples is long."""

    def datasets(self):
        return Datasets(Rows(lambda i: {"x": np.ones(70 if i == 777 else 2)}, 900), None)

    def collate(self, samples, micro):
        longest = max(len(s["x"]) for s in samples)
        return stack_samples([{"x": np.resize(s["x"], longest)} for s in samples], micro.rows)


class ListPlan(Sound):
    def plan(self, data, settings):
        return [0, 1, 2]


class DrawsNothing(Sound):
    def draw(self, sample, rng):
        sample["x"] += rng.standard_normal(4, dtype=np.float32)


class WithoutIdentity(Sound):
    def identity(self):
        self.width = 4


class TorchGroups(Sound):
    def parameter_groups(self, model, weight_decay):
        return [{"params": list(model.parameters()), "lr": 0.1}]


class WithoutMethods(Task):
    def loss(self, model, batch):
        return {"loss": model(batch["x"])}


class OwnScore(Sound):
    """A helper that has the name of an optional method."""

    def score(self, prediction):
        return prediction.sum()


class NamedExport(Sound):
    export = "onnx"


class LossOfABatch(Sound):
    def loss(self, batch):
        return {"loss": batch["x"].mean(1)}


class ResultOfNothing(Sound):
    def evaluate(self, model, backend, request, log):
        log("evaluated")

    def predict(self, model, backend, request, log):
        return request.nothing


# -- samples -------------------------------------------------------------------------------------
class Tuples(Sound):
    def make(self, index):
        return np.zeros(4, np.float32), 1


class LibraryTuples(Sound):
    def datasets(self):
        return Datasets(TensorDataset(torch.zeros(16, 4), torch.zeros(16, 2)), None)


class Strings(Sound):
    def make(self, index):
        return {**sample(index), "name": "some text"}


class Ragged(Sound):
    def make(self, index):
        return {"x": np.zeros(4 + index, np.float32)}


class RaggedOwn(Ragged):
    def collate(self, samples, micro):
        return stack_samples(samples, micro.rows)


# -- exceptions ----------------------------------------------------------------------------------
class MissingLabel(Sound):
    def make(self, index):
        return {"x": sample(index)["label"]}


class Doubles(Sound):
    def make(self, index):
        return sample(index, np.float64)


class WithoutGradients(Sound):
    """A derivative with respect to an input, which validation computes too."""

    def datasets(self):
        return Datasets(Rows(self.make), Rows(self.make))

    def loss(self, model, batch):
        x = batch["x"].requires_grad_()
        [slope] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return {"loss": slope.square().mean(1)}


class TwoOutputs(nn.Linear):
    def forward(self, x):
        return super().forward(x), None


class TupleForTensor(Sound):
    def build_model(self, ops):
        return TwoOutputs(4, 2)

    def loss(self, model, batch):
        scores = model(batch["x"])
        return {"loss": F.mse_loss(scores, batch["y"], reduction="none").mean(1)}


class Wide(nn.Sequential):
    def forward(self, x):
        return super().forward(x)


class OtherWidth(Sound):
    def build_model(self, ops):
        return Wide(nn.Linear(9, 2))


class FloatLabels(Sound):
    """What `build_model` prints is not printed by the estimate of memory too."""

    def build_model(self, ops):
        print("building", flush=True)
        return super().build_model(ops)

    def loss(self, model, batch):
        return {"loss": F.cross_entropy(model(batch["x"]), batch["x"][:, 0])}


class FailingConstructor(Sound):
    def __init__(self, data_path=""):
        self.width = {}["width"]


class Reads(Sound):
    def loss(self, model, batch):
        losses = super().loss(model, batch)
        if losses["loss"].max().item() > 1e9:
            print("a large loss")
        return losses


# -- a script's habits ---------------------------------------------------------------------------
class OnCuda(Sound):
    def loss(self, model, batch):
        return {"loss": (model(batch["x"].cuda()) - batch["y"].cuda()).square().mean(1)}


class OtherKey(Sound):
    def loss(self, model, batch):
        return {"loss": (model(batch["input"]) - batch["y"]).square().mean(1)}


class Habit(nn.Linear):
    """Its `forward` is a script's."""

    def __init__(self, habit):
        super().__init__(4, 2)
        self.habit = habit


class Forgetting(Habit):
    def forward(self, x):
        super().forward(x)


class Numpy(Habit):
    def forward(self, x):
        return torch.from_numpy(np.tanh(super().forward(x).numpy()))


class ToCpu(Habit):
    def forward(self, x):
        return super().forward(x).cpu()


class Printing(Habit):
    def forward(self, x):
        print("shapes", x.shape, f"{len(x)}")
        print("mean", x.mean())
        return super().forward(x)


class ForwardWithoutReturn(Sound):
    model = Forgetting

    def build_model(self, ops):
        return self.model(self.model.__name__)


class NumpyInForward(ForwardWithoutReturn):
    model = Numpy


class OutputOnCpu(ForwardWithoutReturn):
    model = ToCpu


class PrintsInForward(ForwardWithoutReturn):
    model = Printing


class Backward(Sound):
    def loss(self, model, batch):
        loss = super().loss(model, batch)["loss"].mean()
        loss.backward()
        return {"loss": loss}


class Clearing(Sound):
    def loss(self, model, batch):
        model.zero_grad()
        return super().loss(model, batch)
