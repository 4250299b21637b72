"""Right answers to the exercises, written in other styles than the worked ones.

A function is named EXERCISE__STYLE. They need not be pretty: students' are not, either, and
students write no types.
"""
# mypy: ignore-errors

from collections import deque
from itertools import islice

import numpy as np
import torch
from torch.optim import SGD

import mfac


def eq_7__numpy(G, lam):
    rows = G.numpy()
    v = np.zeros_like(rows)
    d = np.zeros_like(rows[:, 0])
    for i in range(len(rows)):
        v[i] = rows[i] / lam - sum(v[j] * (v[j] @ rows[i]) / (len(rows) + d[j]) for j in range(i))
        d[i] = v[i] @ rows[i]
    return torch.from_numpy(v), torch.from_numpy(d)


def eq_10__two_products(v, d, g, lam):
    return g - lam * v.T @ ((v @ g) / (len(d) + d))


def fisher_product__sum_over_gradients(G, x, lam):
    return sum(g * (g @ x) for g in G) / len(G) + lam * x


def closed_form__eigenvectors(G, g, lam):
    kappa, u = torch.linalg.eigh(G @ G.T)
    return g - G.T @ (u @ ((u.T @ (G @ g)) / (kappa + len(G) * lam)))


def conjugate_gradients__while(product, g, iterations):
    x, y, u, k = g * 0, g, g, 0
    while k < iterations and y.norm() > 0:
        Au = product(u)
        eta = (y @ y) / (u @ Au)
        new = y - eta * Au
        x, u, y = x + eta * u, new + (new @ new) / (y @ y) * u, new
        k += 1
    return x


def lora_forward__matmul(x, W_q, bias, A_q, B_q, scale):
    return x @ W_q.mT + bias + (x @ A_q.mT @ B_q.mT) * scale


def merge__in_parts(W_qkv, A_q, B_q, A_v, B_v, scale):
    new = W_qkv.clone()
    dim = W_qkv.shape[1]
    new[:dim] += scale * (B_q @ A_q)
    new[-dim:] += scale * (B_v @ A_v)
    return new


def mae_loss__weights(prediction, patches, removed):
    spread, middle = torch.var_mean(patches, dim=2, keepdim=True)
    errors = (prediction - (patches - middle) * (spread + 1e-6).rsqrt()) ** 2
    return (errors.mean(2) * removed).sum() / removed.sum()


def lower_step__backward(L_P, theta_P, theta_D, phi_P, batch, lam, opt_P):
    opt_P.zero_grad()
    L_P(theta_P, phi_P, batch).backward()
    row = theta_P.grad.clone()
    theta_P.grad += lam * (theta_P.detach() - theta_D.detach())
    opt_P.step()
    return row


def upper_step__second_term_first(L_D, theta_P, theta_D, phi_D, batch, solve, opt_D):
    at_D = torch.autograd.grad(L_D(theta_D, phi_D, batch), [theta_D, phi_D])
    at_P = torch.autograd.grad(L_D(theta_P, phi_D, batch), [theta_P, phi_D])
    q = solve(at_P[0])
    theta_D.grad, phi_D.grad = q + at_D[0], at_P[1] + at_D[1]
    opt_D.step()
    return q


def algorithm_1__in_one_piece(problem):
    theta, phi_P, phi_D, L_P, L_D, pretext, labelled, hypergrad, lr, lam, T, N_L, N_U = problem
    P, D, h_P, h_D = (x.detach().clone().requires_grad_() for x in (theta, theta, phi_P, phi_D))
    opt_P, opt_D = SGD([P, h_P], lr), SGD([D, h_D], lr)
    rows = deque(maxlen=N_L)
    for _ in range(T):
        for batch in islice(pretext, N_L):
            rows.append(lower_step__backward(L_P, P, D, h_P, batch, lam, opt_P))
        solve = hypergrad(torch.stack([*rows]).transpose(0, 1), lam)
        for batch in islice(labelled, N_U):
            upper_step__second_term_first(L_D, P, D, h_D, batch, solve, opt_D)
    return P.detach().clone()


def with_the_head__big_system(loss_P, theta, phi, lam, g):
    (tt, tp), (pt, pp) = torch.autograd.functional.hessian(loss_P, (theta, phi))
    top = torch.cat([tt + lam * torch.eye(len(theta)).to(tt), tp], 1)
    system = torch.cat([top, torch.cat([pt, pp], 1)])
    right = torch.cat([lam * g, torch.zeros_like(phi)])
    return torch.linalg.solve(system, right)[: len(theta)]


def per_image_rows__square_root(G, images):
    m = len(G)
    C = G - G.mean(0)
    F_hat = G.T @ G / m + (images - 1) * C.T @ C / (m - 1)
    kappa, u = torch.linalg.eigh(F_hat)
    return (kappa.clamp_min(0).sqrt() * len(kappa) ** 0.5)[:, None] * u.T


def with_decay__longer_rows(G, lam, decay):
    ratio = lam / (lam + decay)
    solve = mfac.mfac(G * ratio**0.5, lam)
    return lambda g: ratio * solve(g)


def cached_gradient__backward_on_copy(embed, loss, theta, images, micro):
    leaf = theta.detach().clone().requires_grad_()
    with torch.no_grad():
        z = torch.cat([embed(leaf, x) for x in images.split(micro)])
    dz = torch.func.grad(loss)(z)
    start = 0
    for part in images.split(micro):
        embed(leaf, part).backward(dz[start : start + len(part)])
        start += len(part)
    return leaf.grad
