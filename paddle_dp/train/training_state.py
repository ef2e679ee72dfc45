"""Where a training is: its placed model, its progress, its averages; checked, saved and restored together."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace

from paddle_dp.checkpoint import Checkpoint, Checks, HostMemory, Snapshot
from paddle_dp.data import Loader
from paddle_dp.errors import DivergenceError, NotFiniteError
from paddle_dp.parallel import Learner
from paddle_dp.parallel.ema import Averages
from paddle_dp.parallel.layer_settings import LayerSettings
from paddle_dp.recipe import Ema, Guard
from paddle_dp.train import state
from paddle_dp.train.judge import Judge
from paddle_dp.train.progress import Progress
from paddle_dp.train.run import Run
from paddle_dp.train.sound import Soundness
from paddle_dp.train.unsaved import Unsaved


class TrainingState:
    """The learner, the loader and the progress of a training, and what its judge and its averages remember."""

    def __init__(self, learner: Learner, loader: Loader, run: Run, guard: Guard):
        self.learner, self.loader, self.mesh, self.run = learner, loader, learner.mesh, run
        self.progress = Progress()
        self.averages: Averages | None = None
        self.soundness = Soundness(run, loader)
        self.judge = Judge(guard, scaled=learner.mixed.scale is not None)
        self._base = ""  # the digest of the weights that an adapter stands on
        self._unsaved = Unsaved()
        self._settings: LayerSettings | None = None  # of the layers, when they were first looked at

    def keep_averages(self, settings: Ema) -> None:
        """Keeps averages of the weights from now on: they begin as these are. Call it on every rank."""
        self.averages = Averages(self.learner, settings)

    def check(self, when: str, states: bool = False) -> None:
        """Raises NotFiniteError unless all weights are finite, DivergenceError unless replicas are equal bit by bit and
        layers are set alike; with `states`, for optimizer states, too. Collective; the same error on every rank.

        The message names the tensor, its rank, the last good step and the checkpoint to go back to.
        """
        self.learner.settle()
        try:
            self._check_settings(when)  # first: another learning rate is why weights differ
            with self.learner.optimizer_states_on_device() if states else nullcontext():
                self.learner.check(when, state.optimizer_states(self.learner) if states else ())
        except (DivergenceError, NotFiniteError) as error:
            raise self.soundness.explained(error, self.progress.step) from None
        self.soundness.step = self.progress.step

    def _check_settings(self, when: str) -> None:
        """Raises DivergenceError where a layer or the rate was changed on some ranks; names what forward changes."""
        if self._settings is None:
            self._settings = LayerSettings(self.learner)
        for sentence in self._settings.check(when):
            if sentence not in self.learner.noticed:
                self.learner.noticed.append(sentence)
                if self.mesh.is_main:
                    print(f"{when}: {sentence}.", file=sys.stderr, flush=True)

    def snapshot(self, memory: HostMemory | None = None) -> Snapshot:
        """This rank's part of a checkpoint, after buffers are synchronised; copied into `memory` where that is given.
        Collective.

        Raises NotFiniteError or DivergenceError, as `check` does: bad weights are not saved.
        """
        self.learner.settle()
        self.learner.sync_buffers()
        step = self.progress.step
        self.check(f"before the checkpoint of step {step}, which was not written", states=True)
        if step:
            self._unsaved.print_new(self.learner)
        checks = Checks(agreed=True, finite=True, step=step)
        guard = self.judge.state()
        taken = state.snapshot(self.learner, self.progress, self.run, self.loader, guard, memory)
        if self.averages is not None:
            taken = state.with_averages(taken, self.averages, memory)
        if self.learner.base:
            self._base = self._base or state.digest_of_base(self.learner)
            taken = state.with_base(taken, self._base)
        return replace(taken, checks=checks)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Loads a checkpoint. In its own layout training continues bit by bit; in another, with the same global batches
        and the same counts."""
        self._restore(checkpoint)
        self.judge.load(checkpoint.state.get("guard"))

    def _restore(self, checkpoint: Checkpoint) -> None:
        """All but what the judge remembers."""
        self.learner.settle()
        self.progress, self.soundness.step = state.restore(checkpoint, self.learner, self.averages), None
