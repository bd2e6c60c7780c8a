# %% [markdown]
# # Few-shot learning with your own pictures
#
# **In short.** Train a representation once on any classes you have many pictures of; it then learns *new* classes from a few pictures each, at
# once. On the command line that is `bilax run few-shot` and `bilax adapt`; here is the same from Python, small enough for a page: trained on digits,
# used on letters that it has never seen.
#
# The leader's x is a shared network, the follower's y one linear classifier per task. Each outer step draws some tasks (a few classes, a few examples
# of each); the follower fits its classifier to the examples, and the leader wants it to be right on others.

# %%
import os
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from bilax.experiments.few_shot.run import FewShot
from bilax.experiments.few_shot.trained import load_trained
from PIL import Image, ImageDraw, ImageFont

quick = "BILAX_QUICK" in os.environ
folder = Path(tempfile.mkdtemp())
run = FewShot(
    method="ia-gm", dataset="digits", way=3, shots=3, queries=5, filters=8 if quick else 16, distortions=True,
    outer_steps=5 if quick else 600, test_tasks=20 if quick else 300, out=folder / "run", json=True,
)  # fmt: skip
result = run.train()
print({name: round(value, 3) for name, value in result["measures"].items() if isinstance(value, float)})

# %% [markdown]
# ## Pictures of your own
#
# Files in one folder per class. Ours are letters, written with a shaky hand: 64 × 64 pixels, each turned, shifted and scaled a little.

# %%
rng = np.random.default_rng(0)
font = ImageFont.load_default(size=40)


def letter(character):
    page = Image.new("L", (64, 64), 0)
    ImageDraw.Draw(page).text((16 + rng.integers(-3, 4), 6 + rng.integers(-3, 4)), character, fill=255, font=font)
    return page.rotate(rng.uniform(-15, 15), resample=Image.Resampling.BILINEAR)


letters, shots, count = "AKT", 3, 20
for character in letters:
    (folder / "pictures" / character).mkdir(parents=True)
    for i in range(shots + count):
        letter(character).save(folder / "pictures" / character / f"{i}.png")

# %% [markdown]
# ## Learn from three, name the rest

# %%
trained = load_trained(folder / "run")
files = {c: [folder / "pictures" / c / f"{i}.png" for i in range(shots + count)] for c in letters}
examples = [path for c in letters for path in files[c][:shots]]
classify = trained.adapt(trained.read(examples), [c for c in letters for _ in range(shots)])
new = [path for c in letters for path in files[c][shots:]]
named = np.asarray(classify(trained.read(new)))
truth = np.asarray([c for c in letters for _ in range(count)])
print(
    f"{np.mean(named == truth):.0%} of {len(new)} letters named rightly, from {shots} examples of each (guessing: 33 %)"
)

# %%
figure, axes = plt.subplots(3, 15, figsize=(9, 2.2), layout="constrained")
shown = np.concatenate([np.arange(i * count, i * count + 15) for i in range(3)])
for axis, i in zip(axes.flat, shown, strict=True):
    axis.imshow(trained.read([new[i]])[0, ..., 0], cmap="gray_r")
    axis.set_title(str(named[i]), fontsize=9, color="#0072B2" if named[i] == truth[i] else "#D55E00")
    axis.axis("off")

# %% [markdown]
# What the network sees: 8 × 8 pixels, as the digits it was trained on. Orange names are wrong.
#
# ## In earnest
#
# ```
# bilax run few-shot --dataset folder --folder my-pictures --shots 5 --out runs/mine
# bilax adapt runs/mine --examples examples/ --pictures new/
# ```
#
# Train on classes that look like those you will meet: photographs for photographs. More training *classes* help more than more pictures of each.
# How methods compare on CIFAR-FS and Omniglot is in [Table 2](../claims.md#table-2).
