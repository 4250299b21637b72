"""All of BiSSLight on one page: Algorithm 1 with a masked autoencoder, on real handwriting.

docs/page.md explains it. Most letters are the paper's; `l.n` is line n of its Algorithm 1. A small
network ψ saw three alphabets. It learns the 24 characters of a fourth one, Greek, by PEFT alone, by
BiSSLight and then PEFT, and by the same with q = 0.
"""
import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as nnf

LAM = 1e-3  # λ, as in the paper
T, N_L, N_U, R = 30, 5, 3, 8  # alternations, lower steps, upper steps, rank; paper: 500, 20, 8, 64
BATCH_P, BATCH_D = 64, 32  # images: without labels, with labels; paper: 256, 64
LR, LR_PHI_P, LR_PEFT = 1e-2, 1e-4, 3e-2  # rates: of Algorithm 1, of φ_P there, of PEFT
WARMUP, EPOCHS, SEED = 5, 25, 0  # rates rise in 5 of the T alternations, and of PEFT's 25 epochs
K, DIM, HEADS, PATCH = 4, 64, 4, 4  # the ViT: layers, width, attention heads, pixels of a patch
PATCHES, KEPT, DECODER_DIM = 49, 12, 48  # of an image; shown in the pretext task; decoder's width
FOLDER = Path(__file__).resolve().parent.parent / "support"  # with the images, and with ψ

# --- M-FAC: q ≈ λ (∇²L^P + λI)⁻¹ g, with stored gradients for ∇²L^P, each layer k by itself -------
def eq_7(G_k):  # a layer's N_L stored gradients -> its M_k: N_L pairs of a vector v_i and d_i
    M_k = []
    for grad_P in G_k:  # in float64
        v_i = grad_P / LAM - sum(v_j * (v_j @ grad_P) / (len(G_k) + d_j) for v_j, d_j in M_k)
        M_k.append((v_i, v_i @ grad_P))
    return M_k
def eq_10(M_k, g_k):  # the layer's part of q, from its part of g
    return g_k - LAM * sum(v_j * (v_j @ g_k) / (len(M_k) + d_j) for v_j, d_j in M_k)
# --- Algorithm 1 ----------------------------------------------------------------------------------
def algorithm_1(psi, theta, phi_P, phi_D, pool, images, labels, q_is_0=False):
    """l.1 is the arguments and the constants above; `pool` has images without labels. Gives θ_P."""
    theta_P, theta_D = theta.clone().requires_grad_(), theta.clone().requires_grad_()  # l.2
    phi_P, phi_D = trainable(phi_P), trainable(phi_D)
    lower, upper = [theta_P, *phi_P.values()], [theta_D, *phi_D.values()]  # what each level trains
    opt_P = adamw([(LR, lower[:1]), (LR_PHI_P, lower[1:])], T * N_L, WARMUP * N_L, beta_2=0.95)
    opt_D = adamw([(LR, upper)], T * N_U, WARMUP * N_U)
    batches_P, batches_D = draws(len(pool), BATCH_P), draws(len(labels), BATCH_D)
    rng = torch.Generator().manual_seed(1)
    for t in range(1, T + 1):  # l.3
        G = []  # l.4
        for _ in range(N_L):  # l.5, lower level
            noise = torch.rand(BATCH_P, PATCHES, generator=rng)  # which patches to hide
            loss_P = L_P(psi, theta_P, phi_P, pool[next(batches_P)], noise)
            grad_P, *g_phi_P = torch.autograd.grad(loss_P, lower)  # l.6, and l.8 in the same pass
            G.append(grad_P)  # l.6
            g_theta_P = grad_P + LAM * (theta_P - theta_D).detach()  # l.7
            opt_P(lower, [g_theta_P, *g_phi_P])  # l.9
        stored = torch.stack(G, 1).double()  # (K, N_L, 4 · R · DIM)
        M = [eq_7(G_k) for G_k in stored]  # l.10
        for _ in range(N_U):  # l.11, upper level
            chosen = next(batches_D)
            loss = L_D(psi, theta_P, phi_D, images[chosen], labels[chosen])
            g, *first = torch.autograd.grad(loss, [theta_P, *phi_D.values()])  # l.12
            q = torch.stack([*map(eq_10, M, g.double())]).to(g)  # l.13, layer by layer
            q = torch.zeros_like(q) if q_is_0 else q
            loss_D = L_D(psi, theta_D, phi_D, images[chosen], labels[chosen])
            grad_D, *second = torch.autograd.grad(loss_D, upper)
            g_theta_D = q + grad_D  # l.14
            g_phi_D = [x + y for x, y in zip(first, second, strict=True)]  # l.15: of both terms
            opt_D(upper, [g_theta_D, *g_phi_D])  # l.16
        if t % 10 == 0:
            print(f"t {t}:  L^P {loss_P:.2f}  L^D at θ_P {loss:.2f}, at θ_D {loss_D:.2f}", end="  ")
            print(f"|q|/|g| {q.norm() / g.norm():.4f}")
    return theta_P.detach()  # l.17
# --- Two losses: of the labels, and of the masked autoencoder -------------------------------------
def L_D(psi, theta, phi_D, images, labels):  # cross-entropy of a linear head on the first token
    return nnf.cross_entropy(linear(f(psi, theta, images)[:, 0], phi_D, "head"), labels)
def L_P(psi, theta, phi_P, images, noise):  # squared error on hidden patches, each standardised
    predicted, hidden = predict(psi, theta, phi_P, images, noise)
    variance, mean = torch.var_mean(patchify(images), -1, keepdim=True)
    true = (patchify(images) - mean) / (variance + 1e-6).sqrt()
    return (predicted - true).square().mean(-1)[hidden].mean()
def predict(psi, theta, phi_P, images, noise):
    """The decoder's patches (images, 49, 3·4·4), and which f did not see, True in (images, 49)."""
    order = noise.argsort(1)  # noise (images, 49): the KEPT patches with the least of it are shown
    position = order.argsort(1)  # of each patch, in this order
    x = linear(f(psi, theta, images, order[:, :KEPT]), phi_P, "decoder_embed")  # to DECODER_DIM
    blanks = phi_P["mask_token"].expand(len(x), PATCHES - KEPT, DECODER_DIM)
    patches = torch.cat([x[:, 1:], blanks], 1)[torch.arange(len(x))[:, None], position]
    x = torch.cat([x[:, :1], patches], 1) + psi["decoder_pos_embed"]  # frozen, so it is in ψ
    x = norm(layer(x, phi_P, "decoder_blocks.0"), phi_P, "decoder_norm")
    return linear(x, phi_P, "decoder_pred")[:, 1:], position >= KEPT
def patchify(images):  # (images, 3, 28, 28) -> (images, 49, 3·4·4): 4·4 pixels, 3 colours
    x = nnf.unfold(images, PATCH, stride=PATCH).unflatten(1, (3, -1))  # (images, 3, 16, 49)
    return x.permute(0, 3, 2, 1).flatten(2)
# --- The network f. `weights`: its tensors, by the names that MAE's authors gave them -------------
def f(psi, theta, images, keep=None):  # tokens (images, 1 + 49, DIM): a first one, then the patches
    x = nnf.conv2d(images, psi["patch_embed.proj.weight"], psi["patch_embed.proj.bias"], PATCH)
    x = x.flatten(2).mT + psi["pos_embed"][:, 1:]  # (images, 49, DIM)
    if keep is not None:
        x = x[torch.arange(len(x))[:, None], keep]  # (images, KEPT, DIM)
    first = psi["cls_token"] + psi["pos_embed"][:, :1]  # the token of the whole image
    x = torch.cat([first.expand(len(x), -1, -1), x], 1)
    for k in range(K):
        x = layer(x, psi, f"blocks.{k}", theta[k])
    return norm(x, psi, "norm")
def layer(x, weights, name, row=None):
    """Attention, then MLP, on (images, tokens, dim); LoRA adds `row` of θ, (4 · R · DIM,)."""
    W = weights[f"{name}.attn.qkv.weight"]  # (3 dim, dim): of queries, keys and values
    if row is not None:  # added to W: B A for queries and values; both B are stored transposed
        A_query, B_query, A_value, B_value = row.view(4, R, DIM)
        W = W + torch.cat([B_query.T @ A_query, torch.zeros_like(W[:DIM]), B_value.T @ A_value])
    y = nnf.linear(norm(x, weights, f"{name}.norm1"), W, weights[f"{name}.attn.qkv.bias"])
    y = y.unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # (3, images, HEADS, tokens, width)
    y = nnf.scaled_dot_product_attention(*y).transpose(1, 2).flatten(2)
    x = x + linear(y, weights, f"{name}.attn.proj")
    y = nnf.gelu(linear(norm(x, weights, f"{name}.norm2"), weights, f"{name}.mlp.fc1"))
    return x + linear(y, weights, f"{name}.mlp.fc2")
def linear(x, weights, name):
    return nnf.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])
def norm(x, weights, name):
    return nnf.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-6)
# --- Fine-tuning, and what it shares with Algorithm 1 ---------------------------------------------
def fit(psi, theta, train, test, labels, rate=LR_PEFT, epochs=EPOCHS, probe=False):
    """PEFT of θ and a new φ_D, or of φ_D alone; returns φ_D, and test accuracy every 5 epochs."""
    theta = theta.clone().requires_grad_()
    phi_D = trainable({"head.weight": torch.zeros(24, DIM), "head.bias": torch.zeros(24)})
    tensors = [*phi_D.values()] if probe else [theta, *phi_D.values()]
    epoch = len(labels) // BATCH_D  # steps in one pass over `train`
    opt = adamw([(rate, tensors)], epochs * epoch, WARMUP * epoch)
    batches, accuracies = draws(len(labels), BATCH_D), []
    for step in range(1, epochs * epoch + 1):
        chosen = next(batches)
        loss = L_D(psi, theta, phi_D, train[chosen], labels[chosen])
        opt(tensors, torch.autograd.grad(loss, tensors))
        if step % (5 * epoch) == 0:
            guesses = linear(f(psi, theta, test)[:, 0], phi_D, "head").argmax(1)
            accuracies.append(100 * (guesses == labels).double().mean().item())
    return phi_D, accuracies
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
def draws(n, size):  # indices of images, `size` at a time: passes in random order, without end
    rng = torch.Generator().manual_seed(SEED)
    while True:
        yield from torch.randperm(n, generator=rng)[: n - n % size].view(-1, size)
def trainable(tensors):
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
# --- Images, and a picture ------------------------------------------------------------------------
def characters(*alphabets):  # images (characters, 20 people, 3, 28, 28); paper is 0 and ink is 1
    grey = np.concatenate([np.load(FOLDER / "omniglot.npz")[name] for name in alphabets])
    return torch.from_numpy(grey)[:, :, None].repeat(1, 1, 3, 1, 1) / 3
def draw(psi, theta, phi_P, images, curves):  # one_page.png, with the decoder φ_P as pretrained
    import matplotlib.pyplot as plt
    patches, hidden = predict(psi, theta, phi_P, images, torch.rand(len(images), PATCHES))
    true, hidden = patchify(images), hidden[..., None]  # a patch keeps its true mean and deviation
    patches = patches.detach() * true.std(-1, keepdim=True) + true.mean(-1, keepdim=True)
    rows = [true, torch.where(hidden, true.min(), true), torch.where(hidden, patches, true)]
    grey = torch.stack(rows)[..., ::3].unflatten(2, (7, 7)).unflatten(4, (4, 4))
    _, (top, bottom) = plt.subplots(2, 1, figsize=(5, 6), layout="constrained")
    top.legend(top.plot(range(5, EPOCHS + 1, 5), np.transpose([*curves.values()])), curves)
    top.set(xlabel="epoch of PEFT", ylabel="test accuracy (%)", xticks=range(5, EPOCHS + 1, 5))
    grey = grey.permute(0, 2, 4, 1, 3, 5).reshape(3 * 28, -1)
    bottom.imshow(grey, cmap="gray_r", vmin=true.min(), vmax=true.max())
    bottom.set(title="whole, three quarters hidden, and filled in", xticks=[], yticks=[])
    plt.savefig("one_page.png", dpi=150)
if __name__ == "__main__":
    torch.set_num_threads(1)  # tensors of this size gain nothing from more
    psi = torch.load(FOLDER / "omniglot.pth", weights_only=True)["model"]
    decoder_names = [x for x in psi if x.startswith(("mask", "decoder")) and "pos" not in x]
    phi_P = {name: psi.pop(name) for name in decoder_names}  # its positions stay in ψ, frozen
    pool = characters("Japanese_(katakana)", "Korean", "Sanskrit").flatten(0, 1)
    greek = (characters("Greek") - pool.mean()) / pool.std()
    pool = (pool - pool.mean()) / pool.std()
    train, test = greek[:, :10].flatten(0, 1), greek[:, 10:].flatten(0, 1)
    labels = torch.arange(24).repeat_interleave(10)  # of train, and of test
    theta = torch.rand(K, 4, R, DIM, generator=torch.Generator().manual_seed(SEED)) / 4 - 1 / 8
    theta[:, 1::2] = 0  # both B, so that θ changes nothing yet. Both A: within ±1/√DIM
    theta = theta.flatten(1)  # (K, 4 · R · DIM)
    phi_D, _ = fit(psi, theta, train, test, labels, rate=LR, epochs=20, probe=True)  # App. C.3
    starts = {"PEFT": theta}
    for name in ("BiSSLight", "q = 0"):
        print(f"{name}: Algorithm 1")
        starts[name] = algorithm_1(psi, theta, phi_P, phi_D, pool, train, labels, name == "q = 0")
    curves = {name: fit(psi, start, train, test, labels)[1] for name, start in starts.items()}
    for n in range(EPOCHS // 5):
        print(f"epoch {5 * n + 5:2}:", *[f" {name} {x[n]:.1f} %" for name, x in curves.items()])
    if find_spec("matplotlib"):
        draw(psi, starts["BiSSLight"], phi_P, greek[[1, 7, 13, 20], 12], curves)
