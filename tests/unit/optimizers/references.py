"""The optimizers' rules in NumPy float64, written from their papers: one step of one variable."""

import re

import numpy as np


class Rule:
    """A rule with its options; `step` changes p and the slots, which are zeros at first."""

    def __init__(self, step, **options):
        self._step, self.options = step, options

    def trajectory(self, p, gradients, rates):
        """Return p after each update, from float64 copies."""
        p, slots, parameters = np.array(p, np.float64), {}, []
        for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
            p = self._step(p, np.asarray(g, np.float64), slots, t, rate, **self.options)
            parameters.append(p.copy())
        return parameters


def mean(slots, name, decay, value, first=0.0):
    slots[name] = decay * slots.get(name, np.full_like(value, first)) + (1 - decay) * value
    return slots[name]


def sgd(p, g, slots, t, rate, momentum=0.0, nesterov=False):
    m = slots["m"] = momentum * slots.get("m", 0) - rate * g
    return p + (momentum * m - rate * g if nesterov else m)


def adam(p, g, slots, t, rate, beta_1=0.9, beta_2=0.999, epsilon=1e-7, amsgrad=False):
    m, v = mean(slots, "m", beta_1, g), mean(slots, "v", beta_2, g**2)
    if amsgrad:
        v = slots["highest"] = np.maximum(slots.get("highest", 0), v)
    corrected = np.sqrt(v / (1 - beta_2**t)) + epsilon / np.sqrt(1 - beta_2**t)
    return p - rate * (m / (1 - beta_1**t)) / corrected


def rmsprop(p, g, slots, t, rate, rho=0.9, momentum=0.0, epsilon=1e-7, centered=False):
    v = mean(slots, "v", rho, g**2)
    if centered:
        v = v - mean(slots, "mean", rho, g) ** 2
    slots["m"] = momentum * slots.get("m", 0) + rate * g / np.sqrt(v + epsilon)
    return p - slots["m"]


def adagrad(p, g, slots, t, rate, initial_accumulator_value=0.1, epsilon=1e-7):
    slots["a"] = slots.get("a", initial_accumulator_value) + g**2
    return p - rate * g / np.sqrt(slots["a"] + epsilon)


def adadelta(p, g, slots, t, rate, rho=0.95, epsilon=1e-7):
    before = np.sqrt(slots.get("d", 0) + epsilon)
    step = before / np.sqrt(mean(slots, "a", rho, g**2) + epsilon) * g
    mean(slots, "d", rho, step**2)
    return p - rate * step


def adamax(p, g, slots, t, rate, beta_1=0.9, beta_2=0.999, epsilon=1e-7):
    slots["u"] = np.maximum(beta_2 * slots.get("u", 0), np.abs(g))
    return p - rate / (1 - beta_1**t) * mean(slots, "m", beta_1, g) / (slots["u"] + epsilon)


def nadam(p, g, slots, t, rate, beta_1=0.9, beta_2=0.999, epsilon=1e-7):
    u, u_next = (beta_1 * (1 - 0.5 * 0.96**n) for n in (t, t + 1))
    product = slots["product"] = slots.get("product", 1) * u
    m, v = mean(slots, "m", beta_1, g), mean(slots, "v", beta_2, g**2)
    ahead = u_next * m / (1 - product * u_next) + (1 - u) * g / (1 - product)
    return p - rate * ahead / (np.sqrt(v / (1 - beta_2**t)) + epsilon)


def lion(p, g, slots, t, rate, beta_1=0.9, beta_2=0.99):
    direction = np.sign(beta_1 * slots.get("m", 0) + (1 - beta_1) * g)
    mean(slots, "m", beta_2, g)
    return p - rate * direction


def schedule_free(p, g, slots, t, rate, beta_1=0.9, beta_2=0.999, epsilon=1e-8, warmup_steps=1):
    z, x = slots.get("z", p), slots.get("x", p)
    v = mean(slots, "v", beta_2, g**2) / (1 - beta_2**t)
    z = slots["z"] = z - rate * min(1, t / warmup_steps) * g / (np.sqrt(v) + epsilon)
    x = slots["x"] = x + (z - x) / t
    return (1 - beta_1) * z + beta_1 * x


def adafactor(
    p, g, slots, t, rate, beta_2_decay=-0.8, epsilon_1=1e-30, epsilon_2=1e-3, clip_threshold=1.0, relative_step=True
):
    def size(x):
        return np.sqrt(np.mean(x**2))

    decay, squares = 1 - t**beta_2_decay, g**2 + epsilon_1
    if p.ndim < 2:
        v = mean(slots, "v", decay, squares)
    else:
        r, c = mean(slots, "r", decay, squares.mean(-1)), mean(slots, "c", decay, squares.mean(-2))
        v = np.outer(r, c) / r.mean()
    u = g / np.sqrt(v)
    return p - max(epsilon_2, size(p)) * min(rate, 1 / np.sqrt(t)) * u / max(1, size(u) / clip_threshold)


def ftrl(
    p,
    g,
    slots,
    t,
    rate,
    learning_rate_power=-0.5,
    initial_accumulator_value=0.1,
    l1_regularization_strength=0.0,
    l2_regularization_strength=0.0,
    l2_shrinkage_regularization_strength=0.0,
    beta=0.0,
):
    before = slots.get("n", np.full_like(p, initial_accumulator_value))
    after = slots["n"] = before + g**2
    grown = after**-learning_rate_power - before**-learning_rate_power
    shrunk = g + 2 * l2_shrinkage_regularization_strength * p
    z = slots["z"] = slots.get("z", 0) + shrunk - grown / rate * p
    below = after**-learning_rate_power / rate + 2 * (l2_regularization_strength + beta / (2 * rate))
    return (np.clip(z, -l1_regularization_strength, l1_regularization_strength) - z) / below


def lamb(p, g, slots, t, rate, beta_1=0.9, beta_2=0.999, epsilon=1e-7):
    m, v = mean(slots, "m", beta_1, g), mean(slots, "v", beta_2, g**2)
    u = m / (1 - beta_1**t) / (np.sqrt(v / (1 - beta_2**t)) + epsilon)
    norms = np.linalg.norm(p), np.linalg.norm(u)
    return p - rate * (norms[0] / norms[1] if all(norms) else 1) * u


def muon(
    p,
    g,
    slots,
    t,
    rate,
    adam_beta_1=0.9,
    adam_beta_2=0.999,
    epsilon=1e-7,
    exclude_layers=(),
    muon_a=3.4445,
    muon_b=-4.7750,
    muon_c=2.0315,
    adam_lr_ratio=1.0,
    momentum=0.95,
    ns_steps=5,
    nesterov=True,
    rms_rate=0.2,
    weight_decay=None,
    adam_weight_decay=None,
):
    """Matrices are kernels of a layer "dense"."""
    if p.ndim != 2 or any(re.search(pattern, "dense/kernel") for pattern in exclude_layers):
        return adam(p, g, slots, t, rate * adam_lr_ratio, adam_beta_1, adam_beta_2, epsilon)
    m = slots["m"] = momentum * slots.get("m", 0) + g
    x = g + momentum * m if nesterov else m
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(ns_steps):
        a = x @ x.T
        x = muon_a * x + (muon_b * a + muon_c * a @ a) @ x
    x = x if x.shape == p.shape else x.T
    return p - rate * x * (1 if rms_rate is None else rms_rate * np.sqrt(max(p.shape)))


NO_DECAY = {"weight_decay": None, "adam_weight_decay": None}
# By the name in `OPTIMIZERS`; "adamw" is adam with the decay that the caller adds.
RULES = {
    "sgd": [Rule(sgd), Rule(sgd, momentum=0.9), Rule(sgd, momentum=0.9, nesterov=True)],
    "adam": [Rule(adam), Rule(adam, beta_1=0.5, beta_2=0.75, epsilon=1e-3), Rule(adam, amsgrad=True, beta_2=0.9)],
    "adamw": [Rule(adam), Rule(adam, amsgrad=True, beta_1=0.5, beta_2=0.75, epsilon=1e-3)],
    "rmsprop": [
        Rule(rmsprop),
        Rule(rmsprop, rho=0.8, momentum=0.5),
        Rule(rmsprop, centered=True, epsilon=1e-4),
        Rule(rmsprop, momentum=0.5, centered=True),
    ],
    "adagrad": [Rule(adagrad), Rule(adagrad, initial_accumulator_value=0.0, epsilon=1e-3)],
    "adadelta": [Rule(adadelta), Rule(adadelta, rho=0.5, epsilon=1e-3)],
    "adamax": [Rule(adamax), Rule(adamax, beta_1=0.5, beta_2=0.75, epsilon=1e-3)],
    "nadam": [Rule(nadam), Rule(nadam, beta_1=0.5, beta_2=0.75, epsilon=1e-3)],
    "lion": [Rule(lion), Rule(lion, beta_1=0.5, beta_2=0.75)],
    "schedulefreeadamw": [
        Rule(schedule_free),
        Rule(schedule_free, beta_1=0.0, beta_2=0.75, epsilon=1e-3, warmup_steps=7),
    ],
    "adafactor": [
        Rule(adafactor),
        Rule(adafactor, beta_2_decay=-0.5, epsilon_1=1e-3, epsilon_2=2.0, clip_threshold=0.5, relative_step=False),
    ],
    "ftrl": [
        Rule(ftrl),
        Rule(ftrl, learning_rate_power=-0.75, l1_regularization_strength=0.01, beta=0.1),
        Rule(
            ftrl,
            initial_accumulator_value=0.5,
            l2_regularization_strength=0.1,
            l2_shrinkage_regularization_strength=0.05,
        ),
    ],
    "lamb": [Rule(lamb), Rule(lamb, beta_1=0.5, beta_2=0.75, epsilon=1e-3)],
    "muon": [
        Rule(muon, **NO_DECAY),
        Rule(muon, muon_a=2.0, muon_b=-1.5, muon_c=0.5, momentum=0.5, ns_steps=3, nesterov=False, **NO_DECAY),
        Rule(muon, exclude_layers=["[kK]ern"], adam_lr_ratio=0.5, adam_beta_1=0.5, epsilon=1e-3, **NO_DECAY),
        Rule(muon, exclude_layers=["^kernel"], rms_rate=None, adam_beta_2=0.75, **NO_DECAY),
    ],
}
