"""All of BiSSLight on one page: Algorithm 1 with a masked autoencoder, on real handwriting.

A small Vision Transformer (ViT) was pretrained without labels on the characters of three alphabets.
Here it learns the 24 characters of a fourth one, Greek, from the drawings of ten people, and is
tested on those of ten others. Its weights ψ stay frozen. Trained are θ, low-rank changes of the
query and value matrices (LoRA), and a linear head φ_D. Three ways, all from the same ψ:
    PEFT         parameter-efficient fine-tuning: θ and φ_D learn from the labelled drawings
    BiSSLight    first Algorithm 1; PEFT then starts from the θ_P that it returns
    q = 0        the same without the implicit gradient q; the difference is what q adds
Letters are the paper's; `l.n` is line n of its Algorithm 1. With matplotlib, it draws one_page.png.
"""
import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

LAM = 1e-3  # λ: pulls θ_P to θ_D (Eq. 4), and damps M-FAC (Sec. 3.1)
T, N_L, N_U, R = 30, 5, 3, 8  # alternations, lower steps, upper steps, rank; paper: 500, 20, 8, 64
B_P, B_D = 64, 32  # images in a batch without labels, in one with labels; paper: 256, 64
LR, LR_PHI_P, LR_PEFT = 1e-2, 1e-4, 3e-2  # rates: of Algorithm 1, of φ_P there, of PEFT
WARMUP, EPOCHS, SEED = 5, 25, 0  # alternations or epochs of warm-up; epochs of PEFT
K, DIM, HEADS, PATCH = 4, 64, 4, 4  # the ViT: layers, width, attention heads, pixels of a patch
PATCHES, KEPT = 49, 12  # of an image; of these the pretext task shows a quarter, as MAE does
FOLDER = Path("support") if Path("support/omniglot.npz").exists() else Path()
# --- The network f_θ. `w` has a network's tensors by the names that MAE's authors gave them -------
def linear(x, w, name):
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])
def norm(x, w, name):
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-6)

def block(x, w, name, row=None):
    """One layer on tokens x (B, tokens, dim); LoRA changes it by a row of θ (4 · R · dim,)."""
    B, tokens, dim = x.shape
    W = w[f"{name}.attn.qkv.weight"]  # (3 dim, dim): of queries, keys and values
    if row is not None:
        A_q, B_q, A_v, B_v = row.view(4, R, dim)  # B_q and B_v are stored transposed
        W = W + torch.cat([B_q.T @ A_q, torch.zeros_like(W[:dim]), B_v.T @ A_v])
    y = F.linear(norm(x, w, f"{name}.norm1"), W, w[f"{name}.attn.qkv.bias"])
    y = y.view(B, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)  # (3, B, heads, tokens, dim / heads)
    y = F.scaled_dot_product_attention(*y).transpose(1, 2).flatten(2)
    x = x + linear(y, w, f"{name}.attn.proj")
    y = F.gelu(linear(norm(x, w, f"{name}.norm2"), w, f"{name}.mlp.fc1"))
    return x + linear(y, w, f"{name}.mlp.fc2")

def f(psi, theta, images, keep=None):
    """Tokens (B, 1 + 49, DIM): one of the whole image, then of all patches or those to keep."""
    x = F.conv2d(images, psi["patch_embed.proj.weight"], psi["patch_embed.proj.bias"], PATCH)
    x = x.flatten(2).mT + psi["pos_embed"][:, 1:]  # (B, 49, DIM)
    if keep is not None:
        x = x[torch.arange(len(x))[:, None], keep]  # (B, KEPT, DIM)
    first = (psi["cls_token"] + psi["pos_embed"][:, :1]).expand(len(x), -1, -1)
    x = torch.cat([first, x], 1)
    for k in range(K):
        x = block(x, psi, f"blocks.{k}", theta[k])
    return norm(x, psi, "norm")

def patchify(images):  # (B, 3, 28, 28) -> (B, 49, 48): the numbers of each patch
    x = F.pixel_unshuffle(images, PATCH).unflatten(1, (3, -1))  # (B, 3, 16, 7, 7)
    return x.permute(0, 3, 4, 2, 1).flatten(3).flatten(1, 2)
def predict(psi, theta, phi_P, images, noise):
    """The decoder's patches (B, 49, 48), and which of them the network did not see (B, 49)."""
    order = noise.argsort(1)  # noise (B, 49): the KEPT patches with the least of it are shown
    place = order.argsort(1)  # where each patch stands in this order
    x = linear(f(psi, theta, images, order[:, :KEPT]), phi_P, "decoder_embed")  # (B, 1 + KEPT, 48)
    blanks = phi_P["mask_token"].expand(len(x), PATCHES - KEPT, -1)
    patches = torch.cat([x[:, 1:], blanks], 1)[torch.arange(len(x))[:, None], place]
    x = torch.cat([x[:, :1], patches], 1) + psi["decoder_pos_embed"]  # which stays as it is
    x = norm(block(x, phi_P, "decoder_blocks.0"), phi_P, "decoder_norm")
    return linear(x, phi_P, "decoder_pred")[:, 1:], place >= KEPT

def L_P(psi, theta, phi_P, images, noise):
    """Masked autoencoding: squared error on the patches not seen, each standardised."""
    predicted, hidden = predict(psi, theta, phi_P, images, noise)
    variance, mean = torch.var_mean(patchify(images), -1, keepdim=True)
    true = (patchify(images) - mean) / (variance + 1e-6).sqrt()
    return (predicted - true).square().mean(-1)[hidden].mean()
def L_D(psi, theta, phi_D, images, labels):  # cross-entropy of a linear head on the first token
    return F.cross_entropy(linear(f(psi, theta, images)[:, 0], phi_D, "head"), labels)

# --- M-FAC: q ≈ λ (∇²L^P + λI)⁻¹ g from gradients alone, in each block (here: layer) by itself ----
def eq_7(G_k):  # from a block's stored gradients g_i, G_k (N_L, p): N_L pairs v_i (p,), d_i
    M_k = []
    for g_i in G_k.double():  # float64, since numbers that are nearly equal are subtracted
        v_i = g_i / LAM - sum(v_j * (v_j @ g_i) / (len(G_k) + d_j) for v_j, d_j in M_k)
        M_k.append((v_i, v_i @ g_i))
    return M_k
def eq_10(M_k, g_k):  # the block's part of q, from its part of g; both (p,)
    g = g_k.double()
    return (g - LAM * sum(v_j * (v_j @ g) / (len(M_k) + d_j) for v_j, d_j in M_k)).to(g_k)

# --- Algorithm 1, and PEFT after it ---------------------------------------------------------------
def draws(n, size):  # numbers of images, `size` at a time: passes in random order, without end
    rng = torch.Generator().manual_seed(SEED)
    while True:
        yield from torch.randperm(n, generator=rng)[: n - n % size].view(-1, size)
def trained(tensors):
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}

def adamw(groups, steps, warmup, beta_2=0.999):  # groups: pairs of a rate and its tensors
    groups = [{"lr": lr, "params": tensors} for lr, tensors in groups]
    opt = torch.optim.AdamW(groups, betas=(0.9, beta_2), weight_decay=0.05)
    def share_of_rate(done):  # rises for `warmup` steps, then falls as half a cosine
        falling = (1 + math.cos(math.pi * (done - warmup) / (steps - warmup))) / 2
        return (done + 1) / (warmup + 1) if done < warmup else falling
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, share_of_rate)
    def update(tensors, gradients):
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient
        opt.step()
        schedule.step()
    return update

def algorithm_1(psi, theta, phi_P, phi_D, pool, images, labels, use_q=True):
    """l.1 is the arguments and the constants above; `pool` has no labels. Returns θ_P."""
    theta_P, theta_D = theta.clone().requires_grad_(), theta.clone().requires_grad_()  # l.2
    phi_P, phi_D = trained(phi_P), trained(phi_D)
    lower, upper = [theta_P, *phi_P.values()], [theta_D, *phi_D.values()]  # what each level trains
    opt_P = adamw([(LR, lower[:1]), (LR_PHI_P, lower[1:])], T * N_L, WARMUP * N_L, beta_2=0.95)
    opt_D = adamw([(LR, upper)], T * N_U, WARMUP * N_U)
    D_P, D_D, rng = draws(len(pool), B_P), draws(len(labels), B_D), torch.Generator().manual_seed(1)
    for _ in range(T):  # l.3
        G = []  # l.4
        for _ in range(N_L):  # l.5
            noise = torch.rand(B_P, PATCHES, generator=rng)  # hides other patches in each step
            loss = L_P(psi, theta_P, phi_P, pool[next(D_P)], noise)
            grad_P, *g_phi_P = torch.autograd.grad(loss, lower)  # l.6, l.8
            G.append(grad_P)  # l.6
            g_P = grad_P + LAM * (theta_P - theta_D).detach()  # l.7
            opt_P(lower, [g_P, *g_phi_P])  # l.9
        M = [eq_7(G_k) for G_k in torch.stack(G, 1)]  # l.10, layer by layer
        for _ in range(N_U):  # l.11
            i = next(D_D)
            loss = L_D(psi, theta_P, phi_D, images[i], labels[i])
            g, *at_P = torch.autograd.grad(loss, [theta_P, *phi_D.values()])  # l.12
            q = torch.stack([eq_10(M_k, g_k) for M_k, g_k in zip(M, g, strict=True)])  # l.13
            loss = L_D(psi, theta_D, phi_D, images[i], labels[i])
            grad_D, *at_D = torch.autograd.grad(loss, upper)  # l.14
            g_D = q + grad_D if use_q else grad_D  # l.14
            g_phi_D = [x + y for x, y in zip(at_P, at_D, strict=True)]  # l.15
            opt_D(upper, [g_D, *g_phi_D])  # l.16
    return theta_P.detach()  # l.17

def fit(psi, theta, phi_D, train, test, labels, rate=LR_PEFT, epochs=EPOCHS, probe=False):
    """Train θ and φ_D, or only φ_D; yields the accuracy on the test images every five epochs."""
    theta = theta.clone().requires_grad_()
    tensors = [*phi_D.values()] if probe else [theta, *phi_D.values()]
    epoch = len(labels) // B_D  # steps in one pass over `train`
    opt, D_D = adamw([(rate, tensors)], epochs * epoch, WARMUP * epoch), draws(len(labels), B_D)
    for step in range(1, epochs * epoch + 1):
        i = next(D_D)
        opt(tensors, torch.autograd.grad(L_D(psi, theta, phi_D, train[i], labels[i]), tensors))
        if step % (5 * epoch) == 0:
            guesses = linear(f(psi, theta, test)[:, 0], phi_D, "head").argmax(1)
            yield 100 * (guesses == labels).double().mean().item()

def characters(*alphabets):  # images (characters, 20 people, 3, 28, 28); 4 pixels a byte
    file = np.load(FOLDER / "omniglot.npz")
    packed = torch.from_numpy(np.concatenate([file[name] for name in alphabets]))
    pixels = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    return (pixels.view(-1, 20, 1, 28, 28) / 3).repeat(1, 1, 3, 1, 1)
def draw(psi, theta, phi_P, image, curves):  # one_page.png
    import matplotlib.pyplot as plt
    true, noise = patchify(image), torch.rand(1, PATCHES)
    patches, hidden = predict(psi, theta, phi_P, image, noise)
    std, mean = torch.std_mean(true, -1, keepdim=True)
    masked = torch.where(hidden[..., None], true.min(), true)
    filled = torch.where(hidden[..., None], patches * std + mean, true)
    grey = torch.cat([true, masked, filled])[..., ::3].unflatten(1, (7, 7)).unflatten(3, (4, 4))
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 3))
    left.legend(left.plot(range(5, EPOCHS + 1, 5), curves), ["PEFT", "BiSSLight", "q = 0"])
    right.imshow(grey.detach().permute(1, 3, 0, 2, 4).reshape(28, 84), cmap="gray_r")
    plt.savefig("one_page.png")

if __name__ == "__main__":
    psi = torch.load(FOLDER / "omniglot.pth", weights_only=True)["model"]
    phi_P = {name: x for name, x in psi.items() if name.startswith(("decoder", "mask"))}
    del phi_P["decoder_pos_embed"]  # φ_P is what the lower level trains
    pool = characters("Japanese_(katakana)", "Korean", "Sanskrit").flatten(0, 1)
    greek = (characters("Greek") - pool.mean()) / pool.std()
    pool = (pool - pool.mean()) / pool.std()
    train, test = greek[:, :10].flatten(0, 1), greek[:, 10:].flatten(0, 1)
    labels = torch.arange(24).repeat_interleave(10)  # of train, and of test
    theta = torch.rand(K, 4, R, DIM, generator=torch.Generator().manual_seed(SEED)) / 4 - 1 / 8
    theta[:, 1::2] = 0  # B_q and B_v, so that f_θ is f_ψ; A_q and A_v are within ±1/√DIM
    theta = theta.flatten(1)
    head = {"head.weight": torch.zeros(24, DIM), "head.bias": torch.zeros(24)}
    phi_D = trained(head)
    list(fit(psi, theta, phi_D, train, test, labels, LR, 20, probe=True))  # l.1's φ_D (App. C.3)
    aligned = algorithm_1(psi, theta, phi_P, phi_D, pool, train, labels)
    q_0 = algorithm_1(psi, theta, phi_P, phi_D, pool, train, labels, use_q=False)
    fits = [fit(psi, x, trained(head), train, test, labels) for x in (theta, aligned, q_0)]
    curves = []
    for a, b, c in zip(*fits, strict=True):
        curves.append((a, b, c))
        print(f"epoch {5 * len(curves):2}:  PEFT {a:.1f} %   BiSSLight {b:.1f} %   q = 0 {c:.1f} %")
    if find_spec("matplotlib"):
        draw(psi, aligned, phi_P, greek[7:8, 12], curves)
