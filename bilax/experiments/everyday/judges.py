"""What the everyday problems are worth, by NumPy, SciPy and scikit-learn in double precision alone.

Each judge has both objectives, written a second time, and the follower's exact answer to any x.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import optimize, special
from sklearn.linear_model import ElasticNet

from bilax.experiments.everyday import data

Range = tuple[Any, Any]
EVERYWHERE = (-np.inf, np.inf)


class Judge(NamedTuple):
    """Both objectives, and the follower's answer."""

    upper: Callable[[Any, Any], float]
    lower: Callable[[Any, Any], float]
    refit: Callable[[Any], Any]
    """x ↦ y, the follower's global minimiser"""
    bounds: Range = EVERYWHERE
    """of the leader's variables in the order of `ravel`; numbers hold for all"""
    within: Range | None = None
    """where to look for the best x, if `bounds` are too wide for that"""
    slope: Callable[[Any], Any] | None = None
    """the gradient of `value`, for a search with many variables"""

    def value(self, x: Any) -> float:
        """F once the follower has answered."""
        return float(self.upper(x, self.refit(x)))


def ravel(x: Any) -> Float[np.ndarray, " n"]:
    """The numbers of x as one vector; of a dictionary in the order of its sorted keys."""
    leaves = [x[key] for key in sorted(x)] if isinstance(x, dict) else [x]
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in leaves])


def unravel(vector: Float[np.ndarray, " n"], like: Any) -> Any:
    """The inverse of `ravel`."""
    if not isinstance(like, dict):
        return np.reshape(vector, np.shape(like))
    ends = np.cumsum([np.size(like[key]) for key in sorted(like)])
    parts = np.split(vector, ends[:-1])
    return {key: np.reshape(part, np.shape(like[key])) for key, part in zip(sorted(like), parts, strict=True)}


def minimise(
    terms: Callable[[np.ndarray], tuple[Any, np.ndarray, np.ndarray]], y: Float[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """Newton's method with backtracking on a convex function; `terms` are its value, gradient and Hessian."""
    while True:
        value, gradient, hessian = terms(y)
        step = np.linalg.solve(hessian, gradient)
        decrease = gradient @ step
        if decrease <= 1e-12 * abs(value):
            # From here values no longer tell points apart, and whole steps gain the last digits.
            return y - step - np.linalg.solve(hessian, terms(y - step)[1])
        while not terms(y - step)[0] <= value - 1e-4 * decrease:
            step, decrease = step / 2, decrease / 2
        y = y - step


def log_loss(margin: np.ndarray) -> np.ndarray:
    """log(1 + exp(−margin))."""
    return np.logaddexp(0, -margin)


def _with_ones(inputs: np.ndarray) -> np.ndarray:
    return np.concatenate([inputs, np.ones((len(inputs), 1))], axis=1)


class Logistic(NamedTuple):
    """Σ weights · log_loss + Σ penalty · v² as a function of the coefficients v."""

    inputs: Float[np.ndarray, "n d"]
    signs: Float[np.ndarray, " n"]
    weights: Float[np.ndarray, " n"]
    penalty: Float[np.ndarray, " d"]

    def terms(self, v: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray]:
        """Value, gradient and Hessian."""
        inputs, signs, weights, penalty = self
        margin = signs * (inputs @ v)
        p = special.expit(-margin)
        value = weights @ log_loss(margin) + penalty @ v**2
        gradient = -inputs.T @ (weights * signs * p) + 2 * penalty * v
        return value, gradient, (inputs.T * (weights * p * (1 - p))) @ inputs + 2 * np.diag(penalty)

    def fit(self) -> Float[np.ndarray, " d"]:
        """The minimiser; columns are brought to one scale, whatever units the features have."""
        scale = np.sqrt((self.inputs**2).mean(0))
        scaled = self._replace(inputs=self.inputs / scale, penalty=self.penalty / scale**2)
        return minimise(scaled.terms, np.zeros(len(scale))) / scale

    def sensitivity(self, v: np.ndarray, held_out: "Logistic") -> Float[np.ndarray, " d"]:
        """H⁻¹ ∂F/∂v, where F is the loss of `held_out`."""
        return np.linalg.solve(self.terms(v)[2], held_out.terms(v)[1])


def _mean_loss(inputs: np.ndarray, signs: np.ndarray) -> Logistic:
    return Logistic(_with_ones(inputs), signs, np.full(len(signs), 1 / len(signs)), np.zeros(inputs.shape[1] + 1))


def _logistic(split: data.Split, bounds: Range) -> Judge:
    """A log-penalty for each feature; the intercept has none."""
    train, target, held_out, held_out_target = split
    training, validation = _mean_loss(train, target), _mean_loss(held_out, held_out_target)

    def fitted(x):
        penalised = training._replace(penalty=np.append(np.exp(x), 0.0))
        return penalised, penalised.fit()

    def upper(x, y):
        return log_loss(held_out_target * (held_out @ y["w"] + y["b"])).mean()

    def lower(x, y):
        return log_loss(target * (train @ y["w"] + y["b"])).mean() + np.exp(x) @ y["w"] ** 2

    def refit(x):
        v = fitted(x)[1]
        return {"w": v[:-1], "b": v[-1]}

    def slope(x):
        penalised, v = fitted(x)
        return -2 * np.exp(x) * (v * penalised.sensitivity(v, validation))[:-1]

    return Judge(upper, lower, refit, bounds, slope=slope)


def penalties() -> Judge:
    """30 log-penalties of a logistic regression."""
    return _logistic(data.tumours().standardised(), (-12.0, 8.0))


def unscaled() -> Judge:
    """The same for ten features as they are measured, from 1e-2 to 1e3."""
    split = data.tumours()
    return _logistic(split._replace(train=split.train[:, :10], held_out=split.held_out[:, :10]), (-20.0, 5.0))


COSTS = np.array([1.0, 1.5, 2.0, 4.0])


def _tolls(charge: Callable[[np.ndarray], Any], refit: Callable[[np.ndarray], np.ndarray]) -> Judge:
    def cost(x):
        return COSTS + np.append(x, 0.0)

    return Judge(
        upper=lambda x, y: -x @ y[:3],
        lower=lambda x, y: cost(x) @ y + charge(y),
        refit=lambda x: refit(cost(x)),
        bounds=(0.0, 5.0),
    )


def tolls_entropy() -> Judge:
    """Travellers spread by a softmax of twice the cost."""
    return _tolls(lambda y: 0.5 * special.xlogy(y, y).sum(), lambda cost: special.softmax(-2 * cost))


def tolls_squares() -> Judge:
    """Travellers spread by the projection of −cost onto the simplex."""
    return _tolls(lambda y: 0.5 * y @ y, lambda cost: project_simplex(-cost))


def project_simplex(v: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """The nearest point whose coordinates are not negative and sum to one."""
    falling = np.sort(v)[::-1]
    thresholds = (np.cumsum(falling) - 1) / np.arange(1, len(v) + 1)
    return np.maximum(v - thresholds[falling > thresholds][-1], 0)


def ridge_each() -> Judge:
    """Ten log-penalties of a ridge regression; the intercept has none."""
    train, target, held_out, held_out_target = data.diabetes()
    ones, n = _with_ones(train), len(target)

    def refit(x):
        v = np.linalg.solve(ones.T @ ones / n + np.diag(np.append(np.exp(x), 0.0)), ones.T @ target / n)
        return {"w": v[:-1], "b": v[-1]}

    return Judge(
        upper=lambda x, y: ((held_out @ y["w"] + y["b"] - held_out_target) ** 2).mean(),
        lower=lambda x, y: ((train @ y["w"] + y["b"] - target) ** 2).mean() + np.exp(x) @ y["w"] ** 2,
        refit=refit,
        bounds=(-15.0, 5.0),
    )


def ridge_one() -> Judge:
    """One log-penalty for 65 features."""
    train, target, held_out, held_out_target = data.diabetes_products()
    return Judge(
        upper=lambda x, y: ((held_out @ y - held_out_target) ** 2).mean(),
        lower=lambda x, y: 0.5 * ((train @ y - target) ** 2).sum() + 0.5 * np.exp(x) * (y @ y),
        refit=lambda x: np.linalg.solve(train.T @ train + np.exp(x) * np.eye(train.shape[1]), train.T @ target),
        within=(-10.0, 15.0),
    )


FIRM_COSTS = np.array([10.0, 20.0, 45.0])


def duopoly() -> Judge:
    """Three firms answer a leader's quantity by their equilibrium, which minimises a potential; some stay out."""

    def refit(x):
        gain = 100 - float(x) - FIRM_COSTS
        for k in (3, 2, 1):
            y = np.where(np.arange(3) < k, gain - gain[:k].sum() / (k + 1), 0.0)
            if (y >= 0).all():
                return y
        return np.zeros(3)

    return Judge(
        upper=lambda x, y: -(100 - x - y.sum() - 15) * x,
        lower=lambda x, y: (FIRM_COSTS - 100 + x) @ y + 0.5 * y.sum() ** 2 + 0.5 * y @ y,
        refit=refit,
        bounds=(0.0, 100.0),
    )


def portfolio() -> Judge:
    """An investor's mean-variance portfolio for given views, judged by later returns."""
    _, covariance, later = data.market()
    n = len(covariance)
    held = (np.arange(1, 2**n)[:, None] >> np.arange(n)) % 2 == 1

    def lower(x, y):
        return -x["views"] @ y + 0.5 * np.exp(x["log_aversion"]) * y @ covariance @ y

    def upper(x, y):
        return -(later @ y).mean() + 0.1 * (later @ y).var()

    def refit(x):
        # The optimality conditions for every choice of assets that are held: of the feasible points the lowest.
        system = np.zeros((len(held), n + 1, n + 1))
        system[:, :n, :n] = np.where(held[:, :, None], np.exp(x["log_aversion"]) * covariance, np.eye(n))
        system[:, :n, n] = system[:, n, :n] = held
        right = np.concatenate([np.where(held, x["views"], 0.0), np.ones((len(held), 1))], axis=1)
        answers = np.where(held, np.linalg.solve(system, right[..., None])[:, :n, 0], 0.0)
        feasible = answers[(answers >= 0).all(1)]
        return feasible[np.argmin([lower(x, y) for y in feasible])]

    # In the order of sorted keys: log_aversion, then the views.
    return Judge(upper, lower, refit, (np.append(-3.0, np.full(n, -5.0)), np.append(3.0, np.full(n, 5.0))))


def kernel_ridge() -> Judge:
    """Width and penalty of a kernel ridge regression."""
    train, target, held_out, held_out_target = data.waves()
    n = len(target)

    def kernel(a, b, x):
        return np.exp(-0.5 * (a - b.T) ** 2 / np.exp(2 * x["log_width"]))

    def lower(x, y):
        fitted = kernel(train, train, x) @ y
        return ((fitted - target) ** 2).mean() + np.exp(x["log_penalty"]) * (y @ fitted)

    return Judge(
        upper=lambda x, y: ((kernel(held_out, train, x) @ y - held_out_target) ** 2).mean(),
        lower=lower,
        refit=lambda x: np.linalg.solve(kernel(train, train, x) + n * np.exp(x["log_penalty"]) * np.eye(n), target),
        bounds=(-8.0, 4.0),
    )


def example_weights() -> Judge:
    """Sigmoid weights of 120 training examples of a logistic regression, a quarter of them wrong."""
    train, target, held_out, held_out_target = data.wrong_labels()
    validation, n = _mean_loss(held_out, held_out_target), len(target)
    training = _mean_loss(train, target)._replace(penalty=np.full(train.shape[1] + 1, 1e-3))

    def weighted(x):
        return training._replace(weights=special.expit(x) / n)

    def slope(x):
        v = weighted(x).fit()
        pull = training.inputs @ weighted(x).sensitivity(v, validation)
        margin = target * (training.inputs @ v)
        return special.expit(x) * special.expit(-x) / n * target * special.expit(-margin) * pull

    return Judge(
        upper=lambda x, y: log_loss(held_out_target * (validation.inputs @ y)).mean(),
        lower=lambda x, y: (special.expit(x) * log_loss(target * (training.inputs @ y))).mean() + 1e-3 * y @ y,
        refit=lambda x: weighted(x).fit(),
        within=(-8.0, 8.0),
        slope=slope,
    )


def stiff() -> Judge:
    """Least squares of condition number 1e6."""
    A, B, c, wanted = data.stiff()
    return Judge(
        upper=lambda x, y: 0.5 * ((y - wanted) ** 2).sum() + 0.01 * x @ x,
        lower=lambda x, y: 0.5 * ((A @ y - B @ x - c) ** 2).sum(),
        refit=lambda x: np.linalg.lstsq(A, B @ x + c)[0],
        within=(-10.0, 10.0),
    )


def softmax() -> Judge:
    """A log-penalty for each class of a softmax regression; the intercepts have none."""
    train, label, held_out, held_out_label = data.digits()
    classes, n = 5, len(label)
    ones, answers = _with_ones(train), np.eye(classes)[label]

    def cross_entropy(scores, labels):
        return (special.logsumexp(scores, axis=1) - scores[np.arange(len(labels)), labels]).mean()

    def refit(x):
        penalty = np.append(np.ones(train.shape[1]), 0.0)[:, None] * np.exp(x)

        def terms(flat):
            v = flat.reshape(-1, classes)
            scores = ones @ v
            p = special.softmax(scores, axis=1)
            # A common shift of the intercepts changes nothing: their squared sum makes the answer unique.
            value = cross_entropy(scores, label) + (penalty * v**2).sum() + v[-1].sum() ** 2
            gradient = ones.T @ (p - answers) / n + 2 * penalty * v
            gradient[-1] += 2 * v[-1].sum()
            hessian = np.empty((ones.shape[1], classes, ones.shape[1], classes))
            for c, d in itertools.product(range(classes), repeat=2):
                hessian[:, c, :, d] = (ones.T * (p[:, c] * ((c == d) - p[:, d]) / n)) @ ones
            hessian[-1, :, -1, :] += 2
            return value, gradient.ravel(), hessian.reshape(flat.size, -1) + 2 * np.diag(penalty.ravel())

        v = minimise(terms, np.zeros(ones.shape[1] * classes)).reshape(-1, classes)
        return {"W": v[:-1], "b": v[-1]}

    return Judge(
        upper=lambda x, y: cross_entropy(held_out @ y["W"] + y["b"], held_out_label),
        lower=lambda x, y: cross_entropy(train @ y["W"] + y["b"], label) + np.exp(x) @ (y["W"] ** 2).sum(0),
        refit=refit,
        bounds=(-12.0, 4.0),
    )


def sensor_weights() -> Judge:
    """Log-weights of 40 measurements in non-negative least squares."""
    mixing, measured, later_mixing, later = data.sensors()

    def refit(x):
        root = np.exp(x / 2)
        return optimize.nnls(root[:, None] * mixing, root * measured, maxiter=1000)[0]

    return Judge(
        upper=lambda x, y: ((later_mixing @ y - later) ** 2).mean(),
        lower=lambda x, y: 0.5 * np.exp(x) @ (mixing @ y - measured) ** 2,
        refit=refit,
        bounds=(-6.0, 6.0),
    )


def svm_dual() -> Judge:
    """Kernel widths of a support vector machine, by its dual in a box."""
    train, sign, held_out, held_out_sign = data.moons()

    def kernel(a, b, x):
        return np.exp(-((a[:, None] - b) ** 2) @ np.exp(x))

    def form(x):
        return sign[:, None] * kernel(train, train, x) * sign + 1e-3 * np.eye(len(sign))

    def refit(x):
        factor = np.linalg.cholesky(form(x))
        right = np.linalg.solve(factor, np.ones(len(sign)))
        return optimize.lsq_linear(factor.T, right, (0, 1), method="bvls", tol=1e-15, max_iter=1000).x

    return Judge(
        upper=lambda x, y: log_loss(held_out_sign * (kernel(held_out, train, x) @ (sign * y))).mean(),
        lower=lambda x, y: 0.5 * y @ form(x) @ y - y.sum(),
        refit=refit,
        bounds=(-6.0, 6.0),
    )


def elastic_net() -> Judge:
    """Both penalties of an elastic net, whose coefficients are the difference of two non-negative vectors."""
    train, target, held_out, held_out_target = data.sparse()
    n = len(target)

    def lower(x, y):
        w = y["plus"] - y["minus"]
        size = np.exp(x["log_l1"]) * (y["plus"] + y["minus"]).sum() + 0.5 * np.exp(x["log_l2"]) * w @ w
        return 0.5 * ((train @ w - target) ** 2).mean() + size

    def refit(x):
        l1, l2 = float(np.exp(x["log_l1"])), float(np.exp(x["log_l2"]))
        model = ElasticNet(alpha=l1 + l2, l1_ratio=l1 / (l1 + l2), fit_intercept=False, tol=1e-13, max_iter=10**6)
        w = model.fit(train, target).coef_
        # The coefficients that are not zero, once more in closed form.
        kept, sign = w != 0, np.sign(w)
        part = train[:, kept]
        w[kept] = np.linalg.solve(part.T @ part / n + l2 * np.eye(kept.sum()), part.T @ target / n - l1 * sign[kept])
        return {"plus": np.maximum(w, 0), "minus": np.maximum(-w, 0)}

    return Judge(
        upper=lambda x, y: ((held_out @ (y["plus"] - y["minus"]) - held_out_target) ** 2).mean(),
        lower=lower,
        refit=refit,
        bounds=(-8.0, 3.0),
    )


APPEAL, RIVAL_APPEAL, RIVAL_COSTS = np.array([3.0, 4.0]), np.array([3.5, 2.5]), np.array([1.0, 0.5])


def pricing() -> Judge:
    """A rival's prices in answer to the leader's, customers choosing by a logit model or not buying."""

    def shares(x, y):
        weight = np.exp(np.concatenate([APPEAL - x, RIVAL_APPEAL - y]))
        return weight / (1 + weight.sum())

    def refit(x):
        # All products of one firm have the same markup m, and (m − 1) exp(m − 1) is known.
        others = 1 + np.exp(APPEAL - x).sum()
        markup = 1 + special.lambertw(np.exp(RIVAL_APPEAL - RIVAL_COSTS).sum() / others / np.e).real
        return RIVAL_COSTS + markup

    return Judge(
        upper=lambda x, y: -(x - 1) @ shares(x, y)[:2],
        lower=lambda x, y: -(y - RIVAL_COSTS) @ shares(x, y)[2:],
        refit=refit,
        bounds=(0.0, 20.0),
    )


def wells() -> Judge:
    """A follower with two wells, the lower of which is meant."""

    def lower(x, y):
        return (y**2 - 1) ** 2 + x * y

    def refit(x):
        roots = np.roots([4.0, 0.0, -4.0, float(x)])
        return min(roots[np.abs(roots.imag) < 1e-9].real, key=lambda y: lower(x, y))

    return Judge(lambda x, y: (x + 0.4) ** 2 + (y - 0.8) ** 2, lower, refit, (-1.0, 1.0))


def tanh_network() -> Judge:
    """Weight decay of a network of two hidden units, whose best weights over many starts are meant."""
    train, target, held_out, held_out_target = data.waves()
    starts = np.random.default_rng(6).normal(size=(24, 7)) * np.array([2, 2, 2, 2, 1, 1, 0.3])

    def predict(inputs, y):
        return np.tanh(inputs * y["w"] + y["b"]) @ y["v"] + y["c"]

    def weights(flat):
        return {"w": flat[:2], "b": flat[2:4], "v": flat[4:6], "c": flat[6]}

    def residuals(flat, x):
        errors = predict(train, weights(flat)) - target
        return np.append(errors / np.sqrt(len(target)), np.exp(x / 2) * flat[:6])

    def refit(x):
        fits = [optimize.least_squares(residuals, start, args=(float(x),), method="lm") for start in starts]
        best = min(fits, key=lambda fit: fit.cost).x
        return weights(optimize.least_squares(residuals, best, "3-point", args=(float(x),), xtol=1e-15, gtol=1e-15).x)

    def lower(x, y):
        decay = sum((y[name] ** 2).sum() for name in "wbv")
        return ((predict(train, y) - target) ** 2).mean() + np.exp(x) * decay

    return Judge(lambda x, y: ((predict(held_out, y) - held_out_target) ** 2).mean(), lower, refit, bounds=(-10.0, 2.0))
