"""Sampling methods for a `BlockProblem`: evolution strategies and reinforcement learning."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from autopart.extras.block_search.block_problem import BlockChoice, BlockProblem

EXCESS = 4.0
"""Penalty for memory above the limit: the step time is multiplied by 1 + EXCESS x relative excess."""


class Best:
    """Record of the best choice so far. A choice that does not fit into memory is first repaired."""

    def __init__(self, problem: BlockProblem):
        self.problem, self.evaluations = problem, 0
        self.choice: BlockChoice | None = None
        self.step_time_s = np.inf

    def see(self, options: np.ndarray, stage_of: np.ndarray) -> np.ndarray:
        """Evaluate several choices. Return their costs, and record the best choice that fits into memory.

        Args:
            options: option of each block in each choice, an array of shape [choices, blocks].
            stage_of: stage of each block in each choice, an array of shape [choices, blocks].
        Returns:
            Seconds of each choice, with a penalty for memory above the limit: an array of shape [choices].
        """
        problem = self.problem
        times, sizes = problem.price(options, stage_of)
        self.evaluations += len(options)
        excess = np.maximum(sizes / problem.memory_bytes - 1, 0).sum(1)
        cost = times * (1 + EXCESS * excess)
        for i in cost.argsort()[: len(cost) if self.choice is None else 1]:
            begins = np.searchsorted(stage_of[i], np.arange(1, problem.num_stages))
            choice = problem.repaired(BlockChoice(tuple(options[i].tolist()), tuple(begins.tolist())))
            if choice is not None and (time_s := problem.step_time_s(choice)) < self.step_time_s:
                self.choice, self.step_time_s = choice, time_s
        return cost


# Evolution strategies

POPULATION, SPREAD, RATE = 64, 0.1, 0.1
"""Choices per step (half of them mirrored), standard deviation of the noise, and step size."""


def evolution_strategies(problem: BlockProblem, seed: int, budget: int) -> tuple[BlockChoice | None, int, float]:
    """Descend along a gradient that is estimated from the cost ranking of perturbed points.

    A point is a vector with one number per block and option, and one number for the size of every stage.
    """
    draws = np.random.default_rng(seed)
    num_blocks, num_stages = problem.num_blocks, problem.num_stages
    point = np.zeros(num_blocks * problem.num_options + num_stages)
    best = Best(problem)
    while best.evaluations < budget:
        noise = draws.standard_normal((POPULATION // 2, len(point)))
        noise = np.concatenate([noise, -noise])
        points = point + SPREAD * noise
        options = points[:, :-num_stages].reshape(len(points), num_blocks, -1).argmax(2)
        share = np.exp(points[:, -num_stages:])
        ends = np.round(np.cumsum(share / share.sum(1, keepdims=True), 1)[:, :-1] * num_blocks)
        place = np.arange(num_stages - 1)
        begins = (
            np.maximum.accumulate(np.clip(ends, 1, num_blocks) - place, axis=1) + place
        )  # at least one block per stage
        begins = np.minimum(begins, num_blocks - (num_stages - 1) + place)
        stage_of = (np.arange(num_blocks)[None, :, None] >= begins[:, None, :]).sum(2)
        cost = best.see(options, stage_of)
        ranks = cost.argsort().argsort() / (len(cost) - 1) - 0.5
        point -= RATE * (ranks @ noise) / (len(cost) * SPREAD)
    return best.choice, best.evaluations, 0.0


# Reinforcement learning

EPISODES, HIDDEN, LEARNING_RATE, ENTROPY = 64, 32, 0.01, 0.003


def reinforcement_learning(problem: BlockProblem, seed: int, budget: int) -> tuple[BlockChoice | None, int, float]:
    """Train a policy that chooses, block by block, an option and whether a new stage begins.

    The inputs of the policy are the position of the block, and time and memory of the stage so far. The reward baseline
    is the mean cost of a batch of choices. Costs are scaled by their standard deviation.
    """
    generator = torch.Generator().manual_seed(seed)
    policy = _Policy(problem, generator)
    optimizer = torch.optim.Adam(policy.weights, lr=LEARNING_RATE)
    best = Best(problem)
    while best.evaluations < budget:
        options, stage_of, surprise, entropy = policy.episodes()
        cost = torch.from_numpy(best.see(options.numpy(), stage_of.numpy()))
        worse = (cost - cost.mean()) / (cost.std() + 1e-12)
        loss = -(worse * surprise).mean() - ENTROPY * entropy.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return best.choice, best.evaluations, 0.0


class _Policy:
    """Two-layer network that maps 5 features of a state to a logit per option and one for a new stage."""

    def __init__(self, problem: BlockProblem, generator: torch.Generator):
        self.problem, self.generator = problem, generator
        sizes = (5, HIDDEN), (HIDDEN,), (HIDDEN, problem.num_options + 1), (problem.num_options + 1,)
        drawn = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
        self.weights = [(x / math.sqrt(len(x)) if x.dim() > 1 else 0 * x).requires_grad_() for x in drawn]
        with torch.no_grad():  # initially, stages have equal numbers of blocks on average
            self.weights[-1][-1] = -math.log(max(1.0, problem.num_blocks / problem.num_stages - 1))
        self.seconds = torch.from_numpy(problem.time_s / problem.time_s.mean() / problem.num_blocks)
        held = [problem.held_bytes(stage) for stage in range(problem.num_stages)]
        self.held = torch.from_numpy(np.stack(held) / problem.memory_bytes)
        self.base = torch.from_numpy(problem.base_bytes / problem.memory_bytes)

    def episodes(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sample one choice per episode from the policy.

        Returns:
            Options and stages of blocks, of shape [episodes, blocks]; negative log-likelihoods and entropies, of
                [episodes].
        """
        problem, (first, bias, second, last) = self.problem, self.weights
        num_blocks, num_stages = problem.num_blocks, problem.num_stages
        stage = torch.zeros(EPISODES, dtype=torch.long)
        taken, held = torch.zeros(2, EPISODES, dtype=torch.float64)
        options, stages, surprise, entropy = [], [], torch.zeros(EPISODES), torch.zeros(EPISODES)
        for block in range(num_blocks):
            where = torch.full((EPISODES,), block / num_blocks, dtype=torch.float64)
            state = torch.stack([where, stage / num_stages, taken * num_stages, held, self.base[stage]], 1)
            numbers = torch.tanh(state @ first + bias) @ second + last
            begin = numbers[:, -1]
            if block:
                forced = num_stages - 1 - stage >= num_blocks - block
                allowed = stage < num_stages - 1
                chance = begin.sigmoid()
                begins = torch.rand(EPISODES, generator=self.generator) < chance.detach()
                free = allowed & ~forced
                begins = torch.where(free, begins, forced)
                picked = torch.where(begins, functional.logsigmoid(begin), functional.logsigmoid(-begin))
                surprise = surprise - picked * free
                stage = stage + begins
                taken, held = taken * ~begins, held * ~begins
            likely = numbers[:, :-1].log_softmax(1)
            option = torch.multinomial(likely.detach().exp(), 1, generator=self.generator)
            surprise = surprise - likely.gather(1, option)[:, 0]
            entropy = entropy - (likely * likely.exp()).sum(1)
            option = option[:, 0]
            taken, held = taken + self.seconds[block, option], held + self.held[stage, block, option]
            options.append(option)
            stages.append(stage)
        return torch.stack(options, 1), torch.stack(stages, 1), surprise, entropy
