"""Wrong samples: read twice, never, in another order, or with another sample's target."""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from itertools import count

import numpy as np

from tests.proof.zoo.case import FaultTable, Setting
from tests.proof.zoo.patching import last, rank, ranks

MLP = Setting("mlp")
CUTS = "paddle_dp.data.sampler:Sampler.cuts"
ORDER = "paddle_dp.data.sampler:_order"
READ = "paddle_dp.data.sample:InProcess.read"
FAULTS = FaultTable()


def in_training(share):
    """Cuts that are wrong in training alone: an evaluation, which the exam makes of less than a batch, would count its
    samples first."""

    @wraps(share)
    def cut(cuts, sampler, size):
        return share(cuts, sampler, size) if sampler.samples >= sampler.batch else cuts(sampler, size)

    return cut


@FAULTS.add("same share", "Paddle's DataParallel examples with a plain DataLoader", MLP, CUTS)
@in_training
def everybody_reads_the_first_share(cuts, sampler, size):
    """Every rank reads the first rank's share: half of the samples are never seen."""
    return cuts(replace(sampler, dp_rank=0), size)


@FAULTS.add("padded shares", "paddle.io.DistributedBatchSampler", MLP, CUTS)
@in_training
def padded_shares(cuts, sampler, size):
    """Shares are made equal by reading samples of the short batch twice."""
    padded = []
    for micro_batch, (start, _) in enumerate(cuts(sampler, size)):
        low = micro_batch * size // sampler.micro_batches
        high = (micro_batch + 1) * size // sampler.micro_batches
        each = -(-(high - low) // sampler.dp_size)
        start = min(start, high - each)
        padded.append((start, start + each))
    return padded


@FAULTS.add("dropped remainder", "samplers with drop_last", MLP, CUTS)
@in_training
def dropped_remainder(cuts, sampler, size):
    """What the ranks cannot share equally is dropped."""
    if ranks() == 1:
        return cuts(sampler, size)
    least = size // sampler.micro_batches // sampler.dp_size
    return [(start, start + min(least, stop - start)) for start, stop in cuts(sampler, size)]


@FAULTS.add("own shuffle", "silent-fault catalogue, DATA", MLP, ORDER, guard="door")
def each_rank_shuffles_for_itself(order, samples, seed, epoch):
    """Each rank shuffles with a seed of its own and then takes its share: some samples twice, some never."""
    return order(samples, seed + 1000 * rank(), epoch)


@FAULTS.add(
    "stale epoch",
    "paddle.io.DistributedBatchSampler without set_epoch",
    Setting("mlp", 2, ("train.length=2 epochs",)),
    ORDER,
    exam="rehearsal",
    guard="rehearsal",
)
def order_of_the_first_epoch(order, samples, seed, epoch):
    """Nobody tells the sampler the epoch: each is read in the order of the first."""
    return order(samples, seed, 0 if ranks() > 1 else epoch)


@FAULTS.add("shifted targets", "silent-fault catalogue, DATA", MLP, READ)
def targets_of_the_next_sample(read, source, epoch, shares):
    """On the last rank each input comes with its neighbour's target."""
    for share in read(source, epoch, shares):
        yield [(x, np.roll(y, 1, axis=0) if last() else y, counted) for x, y, counted in share]


@FAULTS.add("own statistics", "silent-fault catalogue, DATA", MLP, READ)
def normalized_by_the_own_share(read, source, epoch, shares):
    """Each rank takes the mean of its own share away from the inputs."""
    for share in read(source, epoch, shares):
        yield [(x - (x.mean() if ranks() > 1 else 0.3), y, counted) for x, y, counted in share]


@FAULTS.add(
    "sample twice",
    "silent-fault catalogue, DATA",
    MLP,
    "paddle_dp.data.sampler:Sampler.global_batch",
    guard="door",
)
def two_samples_change_places(global_batch, sampler, epoch, k):
    """The last rank reads the first sample of each batch in place of the last one."""
    samples = np.array(global_batch(sampler, epoch, k))
    if last():
        samples[-1] = samples[0]
    return samples


MIXED = Setting("convnet", 2, ("mix={mixup: 0.5, cutmix: 1.0}", "train.micro_batches=2"))


@FAULTS.add(
    "own partners",
    "mixup of PaddleClas and timm: within each rank's batch",
    MIXED,
    "paddle_dp.data.mix:mixed",
)
def mixed_within_the_share(mixed, inputs, targets, drawn):
    """Each rank mixes its samples with one another, the first with its last: other pairs than on one process."""
    if ranks() == 1:
        return mixed(inputs, targets, drawn)
    inputs, targets = (np.concatenate([rows[-1:], rows[1:]]) for rows in (inputs, targets))
    return mixed(inputs, targets, drawn)


@FAULTS.add(
    "own rectangle", "cutmix of PaddleClas and timm: drawn by each rank", MIXED, "paddle_dp.data.mix:draw"
)
def drawn_by_each_rank(draw, mix, seed, epoch, k):
    """Each rank draws the share and the rectangle for itself."""
    return draw(mix, seed + rank(), epoch, k)


def augmented(settings: str) -> Setting:
    pictures = f"dataset={{use: tests.proof.zoo.pictures.Pictures, {settings}}}"
    return Setting("convnet", 2, (pictures, "model.channels=3"))


SEEDED = "paddle_dp.data.sample:seed_sample"


@FAULTS.add(
    "own augmentation",
    "MMDetection's worker_init_fn: the seed is num_workers * rank + worker_id + seed",
    augmented("augment: rand"),
    SEEDED,
    guard="door",
)
def augmented_by_the_seed_of_the_worker(seed_sample, seed, epoch, index):
    """RandAugment draws from a seed that each rank's worker has for itself."""
    seed_sample(seed + rank(), epoch, index)


_reads = count()


@FAULTS.add(
    "own erasing",
    "torch's and Paddle's DataLoader: a worker seeds its generator once",
    augmented("erase: 0.9"),
    SEEDED,
)
def erased_by_the_stream_of_the_worker(seed_sample, seed, epoch, index):
    """Random erasing draws from a generator that goes on from one sample of the worker to the next, equally seeded on
    all ranks: a sample's rectangle depends on how many the rank has read before."""
    seed_sample(seed, epoch, next(_reads) if ranks() > 1 else index)


@FAULTS.add(
    "augmentation by place", "invented: a seed by the place in the batch", augmented("augment: trivial"), READ
)
def augmented_by_the_place_in_the_share(read, source, epoch, shares):
    """TrivialAugment is seeded by the place of a sample in the rank's share, and not in the global batch."""
    from paddle_dp.data.sample import raw_sample, seed_sample

    def samples(indices):
        for place, index in enumerate(indices.tolist()):
            seed_sample(source.sampler.seed, epoch, place if ranks() > 1 else index)
            yield raw_sample(source.dataset, index)

    if hasattr(source.dataset, "take"):
        yield from read(source, epoch, shares)
    for k, sampler in shares:
        reads = sampler.reads(epoch, k)
        yield [(*map(np.stack, zip(*samples(indices), strict=True)), counted) for indices, counted in reads]
