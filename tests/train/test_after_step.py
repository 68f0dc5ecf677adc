"""`Task.after_step`: what moves once a step, beside a plain loop."""

import copy

import pytest
import torch
from fake_backend import FakeBackend
from momentum_task import MoCo

from tpukit.train.config import TrainConfig
from tpukit.train.learner import build_learner


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_teacher_and_a_queue_move_once_a_step(pieces):
    torch.manual_seed(0)
    backend, task, by_hand = FakeBackend(), MoCo(), MoCo()
    model = task.build_model(None)
    plain, batch = copy.deepcopy(model), torch.randn(6, 2, 8, 8)
    config = TrainConfig(optimizer="sgd", momentum=0.0, clip_norm=0.0, ema_decay=0.5, ema_warmup=0)
    learner = build_learner(task, backend, model, config)
    optimizer = torch.optim.SGD(plain.query.parameters(), 0.1)
    average = copy.deepcopy(plain.state_dict())
    for image, text in batch:
        parts = zip(image.chunk(pieces), text.chunk(pieces), strict=True)
        micro = [{"image": i, "text": t, "mask": torch.ones(len(i))} for i, t in parts]
        learner.train_step(micro, 0.1)
        optimizer.zero_grad()
        by_hand.loss(plain, {"image": image, "text": text})["loss"].mean().backward()
        optimizer.step()
        with torch.no_grad():
            by_hand.after_step(plain)
        for name, value in plain.state_dict().items():
            is_mean = name.startswith("query")
            average[name] = torch.lerp(average[name], value, 0.5) if is_mean else value.clone()
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    assert model.steps == 6
    with learner.ema.in_place_of_weights():
        torch.testing.assert_close(model.state_dict(), average)
