"""One small fine-tune per framework, each written as its users write it. `side`: "torch", or "phalanx" with a line changed.

Each returns the final weights of this rank, as numpy-free lists of tensors on the processor.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Weights = list[torch.Tensor]

# PyPI's torchvision is built for a torch with CUDA. Beside one without, its operators do not load, and its import (timm's,
# and Transformers' where it is installed) fails for want of two names. Nothing here calls them.
_vision: Any = None
if importlib.util.find_spec("torchvision") is not None and not torch.cuda.is_available():
    _vision = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _vision.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _weights(model: torch.nn.Module) -> Weights:
    return [value.detach().float().cpu().clone() for value in model.state_dict().values()]


def _batches(rank: int, count: int, size: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    chance = torch.Generator().manual_seed(7 + rank)
    return [
        (torch.randn(size, 16, generator=chance), torch.randint(0, 4, (size,), generator=chance)) for _ in range(count)
    ]


def _net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
    )


# -- Accelerate --------------------------------------------------------------------------------


def accelerate_loop(rank: int, world: int, side: str, folder: str, start: str | None = None) -> Weights:
    """Accumulation, clipping, a checkpoint in the middle (or `start`) that is loaded again, and unwrapping at the end."""
    if side == "phalanx":
        from phalanx.integrations import huggingface

        huggingface.prepare()
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = _net()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    assert type(model).__module__.startswith("phalanx" if side == "phalanx" else "torch")
    assert dist.get_backend() == ("phalanx" if side == "phalanx" else "gloo")

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

    batches = _batches(rank, 8)
    if start is None:
        for batch in batches[:4]:
            step(batch)
        start = os.path.join(folder, "middle")
        accelerator.save_state(start)
        for batch in batches[4:]:
            step(batch)
    accelerator.load_state(start)
    for batch in batches[4:]:
        step(batch)
    # Forward without synchronisation, then a backward that is to be synchronised after all.
    with accelerator.no_sync(model):
        first = model(batches[0][0]).pow(2).mean()
        second = model(batches[1][0]).pow(2).mean()
        accelerator.backward(first)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(second)
    optimizer.step()
    unwrapped = accelerator.unwrap_model(model)
    assert unwrapped is net
    return _weights(unwrapped)


# -- Transformers ------------------------------------------------------------------------------


class _Tokens(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 96, (24,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids.clone()}


def _language_model(kind: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32, "vocab_size": 96}
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(bos_token_id=1, eos_token_id=2, **sizes, **none))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, max_position_embeddings=32, **sizes))


def transformers_trainer(rank: int, world: int, side: str, folder: str, kind: str, start: str | None = None) -> Weights:
    """Gradient checkpointing, checkpoints while training, then a second trainer that resumes (from `start`, if given)."""
    if side == "phalanx":
        from phalanx.integrations import huggingface

        huggingface.prepare()
    from transformers import Trainer, TrainingArguments

    def arguments() -> Any:
        return TrainingArguments(
            output_dir=os.path.join(folder, kind),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            max_steps=6,
            save_steps=3,
            save_strategy="steps",
            logging_steps=100,
            report_to=[],
            use_cpu=True,
            seed=3,
            disable_tqdm=True,
        )

    if start is None:
        trainer = Trainer(model=_language_model(kind), args=arguments(), train_dataset=_Tokens())
        trainer.train()
        whole = _weights(trainer.model)
        start = os.path.join(folder, kind, "checkpoint-3")
    else:
        whole = []
    resumed = Trainer(model=_language_model(kind), args=arguments(), train_dataset=_Tokens())
    resumed.train(resume_from_checkpoint=start)
    assert type(resumed.model_wrapped).__module__.startswith("phalanx" if side == "phalanx" else "torch")
    again = _weights(resumed.model)
    resumed.save_model(os.path.join(folder, kind, "final"))
    assert not whole or all(map(torch.equal, whole, again)), "resuming is not what going on is"
    return again


# -- Lightning ---------------------------------------------------------------------------------


def _lightning_module(manual: bool, side: str) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()
            torch.manual_seed(1)
            self.critic = torch.nn.Linear(4, 1)
            self.automatic_optimization = not manual

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.net(batch)

        def training_step(self, batch: Any, index: int) -> Any:
            inputs, targets = batch
            assert type(self.trainer.strategy.model).__module__.startswith(side)
            if not manual:
                output = self(inputs)
                return torch.nn.functional.cross_entropy(output, targets) + self.critic(output).pow(2).mean()
            # Two optimisers and two backwards in one training step, as in a GAN.
            first, second = self.optimizers()
            output = self(inputs)
            loss = torch.nn.functional.cross_entropy(output, targets)
            first.zero_grad()
            self.manual_backward(loss)
            first.step()
            critic = self.critic(self(inputs).detach()).pow(2).mean()
            second.zero_grad()
            self.manual_backward(critic)
            second.step()

        def configure_optimizers(self) -> Any:
            if not manual:
                return torch.optim.Adam(self.parameters(), lr=1e-2)
            return (
                torch.optim.Adam(self.net.parameters(), lr=1e-2),
                torch.optim.SGD(self.critic.parameters(), lr=1e-1),
            )

    return Module()


def lightning_trainer(rank: int, world: int, side: str, folder: str, manual: bool, resume: str | None = None) -> Weights:
    """Trainer.fit with accumulation (automatic) or two optimisers (manual), a checkpoint, and a resumed run."""
    import lightning
    from torch.utils.data import DataLoader

    os.environ.setdefault("TORCHELASTIC_RUN_ID", "tests")  # how Lightning knows that workers are started already
    if side == "phalanx":
        import phalanx.integrations.lightning  # noqa: F401
    batches = [(x, y) for r in range(world) for x, y in _batches(r, 8)]
    data = [(x[i], y[i]) for x, y in batches for i in range(len(y))]

    def trainer(epochs: int) -> Any:
        return lightning.Trainer(
            strategy="phalanx" if side == "phalanx" else "ddp_find_unused_parameters_true" if manual else "ddp",
            accelerator="cpu",
            devices=world,
            max_epochs=epochs,
            accumulate_grad_batches=1 if manual else 2,
            gradient_clip_val=None if manual else 0.5,
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            logger=False,
        )

    module = _lightning_module(manual, side)
    run = trainer(1)
    run.fit(module, DataLoader(data, batch_size=4))
    run.save_checkpoint(os.path.join(folder, "lightning.ckpt"))
    module = _lightning_module(manual, side)
    trainer(2).fit(module, DataLoader(data, batch_size=4), ckpt_path=resume or os.path.join(folder, "lightning.ckpt"))
    return _weights(module)


def fabric_loop(rank: int, world: int, side: str, folder: str, start: str | None = None) -> Weights:
    """Fabric's own loop: accumulation without synchronisation, clipping, save and load."""
    import lightning

    os.environ.setdefault("TORCHELASTIC_RUN_ID", "tests")
    if side == "phalanx":
        import phalanx.integrations.lightning  # noqa: F401
    fabric = lightning.Fabric(accelerator="cpu", devices=world, strategy="phalanx" if side == "phalanx" else "ddp")
    fabric.launch()
    net = _net()
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))
    for number, (inputs, targets) in enumerate(_batches(rank, 8)):
        accumulating = number % 2 == 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            fabric.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
        if not accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        if number == 3:
            fabric.save(os.path.join(folder, "fabric.ckpt"), {"model": model, "optimizer": optimizer})
        if number == 5:
            fabric.load(start or os.path.join(folder, "fabric.ckpt"), {"model": model, "optimizer": optimizer})
    return _weights(net)


# -- a timm-style loop -------------------------------------------------------------------------


def timm_loop(rank: int, world: int, side: str, folder: str) -> Weights:
    """channels_last, bfloat16 autocast, an exponential average of the model, timm's optimiser and scheduler."""
    import timm
    from timm.optim import create_optimizer_v2
    from timm.utils import ModelEmaV3, unwrap_model

    if side == "phalanx":
        import phalanx
        from phalanx import DistributedDataParallel

        phalanx.init()
    else:
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: Any = timm.create_model("resnet10t", num_classes=5, drop_path_rate=0.0).to(memory_format=torch.channels_last)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    average = ModelEmaV3(model, decay=0.9)
    model = DistributedDataParallel(model)
    chance = torch.Generator().manual_seed(rank)
    for step in range(3):
        images = torch.randn(2, 3, 32, 32, generator=chance).contiguous(memory_format=torch.channels_last)
        targets = torch.randint(0, 5, (2,), generator=chance)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update(unwrap_model(model), step=step)
    both = copy.deepcopy(_weights(unwrap_model(model))) + _weights(average.module)
    if rank == 0:
        Path(folder, "timm").write_text("done")
    dist.barrier()
    dist.destroy_process_group()
    return both
