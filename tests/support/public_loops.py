"""Ten public training scripts in short form: `name(model, batches)`, and what each trains.

`CASES[name]()` gives (function, model, batches, example). Each is written for one device, as its authors have it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

ROWS, WIDTH, CLASSES, STEPS = 8, 8, 4, 3


class GPT(nn.Module):
    """nanoGPT's model: tied embedding, one block."""

    def __init__(self, vocab=16, width=16, heads=2, length=8):
        super().__init__()
        self.heads = heads
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.ln_1, self.ln_2, self.ln_f = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        batch, length = idx.shape
        x = self.wte(idx) + self.wpe(torch.arange(length, device=idx.device))
        q, k, v = self.c_attn(self.ln_1(x)).split(x.shape[-1], dim=2)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(batch, length, -1))
        x = x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def nanogpt(model, batches):
    """karpathy/nanoGPT train.py: groups by dim, warm-up and cosine, accumulation, clipping."""
    params = dict(model.named_parameters())
    groups = [
        {"params": [p for p in params.values() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    losses = []
    for step in range(len(batches) // 2):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        for batch in batches[2 * step : 2 * step + 2]:
            _, loss = model(**batch)
            (loss / 2).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses


def gan_r1(model, batches):
    """A critic with the R1 penalty (Mescheder et al., StyleGAN2), beside a generator that every rank has."""
    torch.manual_seed(1)
    generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, WIDTH))
    of_critic = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.0, 0.99))
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.0, 0.99))
    losses = []
    for real, noise in batches:
        real = real.clone().requires_grad_()
        score = model(real)
        slope = torch.autograd.grad(score.sum(), real, create_graph=True)[0]
        penalty = slope.square().sum(1).mean()
        loss = F.softplus(model(generator(noise).detach())).mean() + F.softplus(-score).mean() + 5.0 * penalty
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        fooled = F.softplus(-model(generator(noise))).mean()
        of_generator.zero_grad()
        fooled.backward()
        of_generator.step()
        losses += [loss.item(), fooled.item()]
    return losses, [p.detach() for p in generator.parameters()]


def pinn(model, batches):
    """A physics-informed network: u'' = -sin(x), with boundary values (maziarraissi/PINNs)."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for (x,) in batches:
        x = x.clone().requires_grad_()
        u = model(x)
        du = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        ddu = torch.autograd.grad(du.sum(), x, create_graph=True)[0]
        loss = (ddu + x.sin()).square().mean() + model(torch.zeros_like(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual, self.text = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image, text):
        image, text = F.normalize(self.visual(image), dim=-1), F.normalize(self.text(text), dim=-1)
        return image, text, self.logit_scale.exp()


def open_clip(model, batches):
    """mlfoundations/open_clip train_one_epoch: the loss outside, no decay for gains, the scale clamped."""
    excluded = [p for n, p in model.named_parameters() if p.ndim < 2 or "logit_scale" in n]
    rest = [p for n, p in model.named_parameters() if not (p.ndim < 2 or "logit_scale" in n)]
    groups = [{"params": excluded, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.2}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    losses = []
    for batch in batches:
        image, text, scale = model(**batch)
        logits = scale * image @ text.T
        labels = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            dict(model.named_parameters())["logit_scale"].clamp_(0, math.log(100))
        losses.append(loss.item())
    return losses


def sam(model, batches):
    """davda54/sam: climb by the norm of all gradients, take the gradient there, go back, step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in batches:
        losses.append(model.step(x, loss_fn=F.cross_entropy, target=y).item())
        with torch.no_grad():
            params = [p for p in model.parameters() if p.grad is not None]
            norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in params]), p=2)
            climbed = [(p, p.grad * 0.05 / (norm + 1e-12)) for p in params]
            for p, e in climbed:
                p.add_(e)
        optimizer.zero_grad()
        model.step(x, loss_fn=F.cross_entropy, target=y)
        with torch.no_grad():
            for p, e in climbed:
                p.sub_(e)
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Distance(torch.optim.Optimizer):
    """The step size of konstmish/prodigy: a quotient of sums over all parameters."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr, "d": 1e-2})

    @torch.no_grad()
    def step(self):
        group, above, below = self.param_groups[0], 0.0, 0.0
        d = group["d"]
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["p0"], state["s"] = p.clone(), torch.zeros_like(p)
            above += torch.dot(p.grad.flatten(), (state["p0"] - p).flatten()).item()
            state["s"].add_(p.grad, alpha=d)
            below += state["s"].abs().sum().item()
        group["d"] = max(d, d * above / below) if below else d
        for p in group["params"]:
            if p.grad is not None:
                p.add_(p.grad, alpha=-group["lr"] * group["d"])


def prodigy(model, batches):
    optimizer, losses = Distance(model.parameters()), []
    for x, y in batches:
        losses.append(model.step(x, loss_fn=F.cross_entropy, target=y).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def mup(model, batches):
    """microsoft/mup MuAdam: the rate of a matrix is divided by its fan-in over that of the base model."""
    groups = [{"params": [p], "lr": 1e-2 * (8 / p.shape[1] if p.dim() == 2 else 1.0)} for p in model.parameters()]
    optimizer, losses = torch.optim.Adam(groups), []
    for x, y in batches:
        losses.append(model.step(x, loss_fn=F.cross_entropy, target=y).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def ngpt(model, batches):
    """NVIDIA/ngpt: rows of all matrices are brought to unit length after each step."""
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for x, y in batches:
        losses.append(model.step(x, loss_fn=F.cross_entropy, target=y).item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() == 2:
                    p.copy_(F.normalize(p, p=2, dim=-1))
    return losses


def maml(model, batches):
    """MAML with torch.func.functional_call: one inner step, the outer gradient through it."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for x, y in batches:
        slow = dict(model.named_parameters())
        inner = F.cross_entropy(torch.func.functional_call(model, slow, (x,)), y)
        grads = torch.autograd.grad(inner, list(slow.values()), create_graph=True)
        fast = {name: p - 0.5 * g for (name, p), g in zip(slow.items(), grads, strict=True)}
        loss = F.cross_entropy(torch.func.functional_call(model, fast, (x,)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trainer(model, batches):
    """A Trainer-like loop: weighted classes, decay by name, linear schedule, clipping, evaluation."""
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not n.endswith("bias")], "weight_decay": 0.01},
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (STEPS + 1))
    losses = []
    model.train()
    for x, y in batches:
        losses.append(model.step(x, loss_fn=criterion, target=y).item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        model.zero_grad()
    model.eval()
    with torch.no_grad():
        return losses, model(batches[0][0])


def classifier(function):
    """A case of (x, y) batches; the smallest model whose every dim can be cut in two."""

    def case():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        batches = [(torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))) for _ in range(STEPS)]
        return function, model, batches, {"example_args": (batches[0][0],)}

    return case


def nanogpt_case():
    torch.manual_seed(0)
    data = torch.randint(16, (2 * STEPS, ROWS, 9))
    return nanogpt, GPT(), [{"idx": ids[:, :-1].clone(), "targets": ids[:, 1:].clone()} for ids in data], {}


def gan_case():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))
    batches = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, 4)) for _ in range(STEPS)]
    return gan_r1, model, batches, {"example_args": (batches[0][0],)}


def pinn_case():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    batches = [(torch.rand(ROWS, 1),) for _ in range(STEPS)]
    return pinn, model, batches, {"example_args": batches[0]}


def clip_case():
    torch.manual_seed(0)
    return open_clip, Clip(), [{"image": torch.randn(8, 8), "text": torch.randn(8, 8)} for _ in range(STEPS)], {}


CASES = {
    "nanogpt": nanogpt_case, "gan_r1": gan_case, "pinn": pinn_case, "open_clip": clip_case,
    "sam": classifier(sam), "prodigy": classifier(prodigy), "mup": classifier(mup), "ngpt": classifier(ngpt),
    "maml": classifier(maml), "trainer": classifier(trainer),
}  # fmt: skip
MESHES = {"tp2": {}, "pp2": {}, "dp2": {}, "dp2 zero": {"zero": 3}}
