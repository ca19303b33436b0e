"""ballast.offload(): passes in every order give the bits of the plain model. Needs torch."""

import unittest

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest(f"needs PyTorch: {error}")

import torch.nn.functional as F
from torch import nn

import ballast
import fake_device
from offload_models import WIDTH, DiTBlock, compare, data, dit, same, sgd, state, train


class Frozen(unittest.TestCase):
    """LoRA over frozen blocks, of which one of eight fits."""

    def test_checkpointing_recomputes_the_same_activations(self):
        for reentrant in (None, False, True):
            def loop(model, _):
                seen = []
                for block in model.blocks:
                    block.mlp[2].register_forward_hook(lambda module, args, out: seen.append(out.detach().clone()))
                losses = train(model, 2)
                if reentrant is not None:
                    for step in range(2):
                        part = seen[16 * step:16 * step + 16]
                        same(part[:8], part[:7:-1], "recomputed")
                return losses, seen

            for blocks, trained in ((1, "keep"), (2, "stream"), (5, "keep")):
                with self.subTest(reentrant=reentrant, blocks=blocks):
                    compare(dit(True, reentrant), loop, blocks, trained=trained, delay=0.0003)

    def test_sampling_between_steps(self):
        def loop(model, _):
            def sample(step):
                if step % 3 != 2:
                    return 0
                results = []
                for mode in (model.train, model.eval):
                    mode()
                    with torch.no_grad():
                        x, t = data(100 + step)
                        for _ in range(2):
                            x = x + 0.1 * (2 * model(x, t) - model(x, t * 0))
                    results.append(x)
                with torch.inference_mode():
                    results.append(model(*data(7)).clone())
                model.train()
                return results
            return train(model, 4, each=sample)

        for make in (dit(True, False), dit(True, True, layers=4), dit(layers=4)):
            _, handle = compare(make, loop, 2)
            report = handle.report()
            self.assertGreater(report.right_guesses, 10 * report.wrong_guesses)

    def test_frozen_blocks_without_gradients(self):
        def loop(model, _):
            with torch.no_grad():
                return [model(*data(step)) for step in range(3)]
        _, handle = compare(dit(True), loop, 1)
        self.assertEqual(handle.report().bytes_out, 0)


class Two(nn.Module):
    """Two lists of blocks of two sizes, and tensors outside of them."""

    def __init__(self):
        super().__init__()
        self.scale, self.embed = nn.Parameter(torch.ones(WIDTH)), nn.Linear(8, WIDTH)
        self.register_buffer("table", torch.randn(64, WIDTH))
        self.pairs = nn.ModuleList(DiTBlock() for _ in range(3))
        self.singles = nn.ModuleList(DiTBlock(ratio=1) for _ in range(5))
        for i, block in enumerate(self.singles):
            block.register_buffer("mean", torch.zeros(512 if i == 0 else 4))
        self.pairs[1] = MeanBlock()
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x, t):
        x = self.embed(x) * self.scale + self.table[:x.shape[1]]
        c = t[:, None] * self.scale
        for block in [*self.pairs, *self.singles]:
            x = block(x, c)
            if "mean" in block._buffers and not isinstance(block, MeanBlock):
                with torch.no_grad():  # from outside of the block
                    block.mean.lerp_(x.mean().expand_as(block.mean), 0.1)
        return self.head(x)


class MeanBlock(DiTBlock):
    """Changes a buffer in its forward pass."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(512))

    def forward(self, x, c):
        with torch.no_grad():
            self.mean.lerp_(x.mean().expand_as(self.mean), 0.1)
        return super().forward(x + self.mean[:WIDTH], c)


class Shared(nn.Module):
    """A block that is called three times, tied weights, and weights that other code uses."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(4))
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[3].attn.o.weight = self.blocks[0].attn.o.weight
        self.far = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids):
        x = F.linear(self.embed(ids), self.blocks[2].attn.k.weight)  # before its block has run
        c = x.mean(1)
        early = self.blocks[1].attn.k.weight.t()
        for i in (0, 1, 1, 2, 1, 3, 2, 0):
            x = self.blocks[i](x, c)
        x = x @ early
        w = self.blocks[1].mlp[2].weight
        x = x + F.linear(F.linear(x, w.t()), w) + x @ self.blocks[2].attn.q.weight.t()
        x = x + F.linear(x, self.blocks[2].attn.q.weight)
        return self.head(self.far(x))


class Moving(nn.Module):
    """Blocks and experts that the data chooses."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(6))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.high, self.low = nn.ModuleList([DiTBlock()]), nn.ModuleList([DiTBlock()])

    def forward(self, x, t):
        key = int(x.sum().item() * 1000) % 64
        x = self.embed(x)
        c = t[:, None].expand(-1, WIDTH)
        for i, block in enumerate(self.blocks):
            if key >> i & 1:
                x = block(x, c)
        for expert in {key % 6, key % 5, key % 4}:
            x = x + self.experts[expert](x)
        for block in self.high if t[0] > 0.5 else self.low:
            x = block(x, c)
        return self.out(x)


class Early(nn.Module):
    """Uses a weight of the first block before all other blocks, and does not run that block."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, t):
        c = self.model.condition(t)
        h = F.linear(self.model.embed(x), self.model.blocks[0].attn.k.weight)
        for block in self.model.blocks[1:]:
            h = block(h, c)
        return h


def seeded(kind):
    def make():
        torch.manual_seed(0)
        return kind()
    return make


class Structures(unittest.TestCase):
    def test_two_lists_and_tensors_outside(self):
        for blocks in (1, 2, 4):
            compare(seeded(Two), lambda model, _: train(model, 3), blocks)

    def test_shared_tied_and_used_elsewhere(self):
        def loop(model, _):
            optimizer, losses = sgd(model, 1e-3), []
            for step in range(2):
                optimizer.zero_grad()
                for micro in range(3):
                    ids = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(10 * step + micro))
                    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
                    loss.backward()
                    losses.append(loss.detach())
                optimizer.step()
            return losses

        for blocks in (2, 3, 9):
            _, handle = compare(seeded(Shared), loop, blocks)
            self.assertEqual(handle.report().staying["blocks.0.attn.o.weight"].reason,
                             "shared by blocks.0 and blocks.3")

    def test_weights_that_were_written_are_used_before_their_block(self):
        def loop(model, _):
            seen = []
            for step in range(3):
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(1.01)
                    seen.append(model(*data(step)))
            return seen
        compare(lambda: Early(dit(layers=5)()), loop, 2)

    def test_outer_blocks_stay_while_inner_ones_run_backward(self):
        names = ["blocks.?", "blocks.?.mlp.?", "blocks.?.attn.?"]
        for prefetch in (0, 2):
            compare(dit(layers=3), lambda model, _: train(model, 2), device_bytes=47 * 1024, names=names,
                    prefetch=prefetch)

    def test_order_depends_on_data(self):
        for blocks in (1, 3):
            compare(seeded(Moving), lambda model, _: train(model, 8), blocks, delay=0.0003, prefetch=2)


class Orders(unittest.TestCase):
    def test_shapes_change(self):
        compare(dit(True, False), lambda model, _: train(
            model, 3, shape=lambda step: {"tokens": 3 + 4 * step, "batch": 1}), 2)

    def test_two_forward_passes_before_a_backward_pass(self):
        def loop(model, _):
            optimizer, seen = sgd(model), []
            for step in range(2):
                optimizer.zero_grad()
                (x, t), (y, u) = data(step), data(step + 50, tokens=9)
                a, b = model(x, t).mean(), model(y, u).pow(2).mean()
                F.softplus(a - b).backward()
                c, d = model(x, t).pow(2).mean(), model(y, u).mean()
                c.backward(retain_graph=True)
                d.backward()
                c.backward()
                e, f = model(x, t).mean(), model(y, u).pow(2).mean()
                f.backward()
                g = model(x, t).mean()
                e.backward()
                seen += [a.detach(), b.detach(), g.detach()]
                optimizer.step()
            return seen

        for make in (dit(layers=4), dit(True, layers=4), dit(True, False, layers=4)):
            compare(make, loop, 2)

    def test_input_gradients_and_zero_grad_in_between(self):
        def loop(model, _):
            optimizer, seen = sgd(model), []
            for step in range(2):
                x, t = data(step)
                x.requires_grad_()
                loss = model(x, t).pow(2).mean()
                optimizer.zero_grad(set_to_none=step == 0)
                loss.backward()
                seen.append(x.grad.clone())
                optimizer.step()
            return seen
        compare(dit(layers=4), loop, 2)

    def test_half_of_the_blocks_get_no_gradient(self):
        def loop(model, _):
            optimizer, seen = sgd(model), []
            for step in range(3):
                optimizer.zero_grad()
                x, t = data(step)
                h, c, outputs = model.embed(x), model.condition(t), []
                for block in model.blocks:
                    h = block(h, c)
                    outputs.append(h)
                loss = outputs[step + 1].pow(2).mean()
                loss.backward()
                seen.append(loss.detach())
                optimizer.step()
            return seen
        compare(dit(layers=5), loop, 2)

    def test_gradients_are_summed_over_passes(self):
        def loop(model, _):
            for step in range(4):
                model(*data(step, dtype=torch.bfloat16)).pow(2).mean().backward()
        compare(dit(dtype=torch.bfloat16, layers=4), loop, 1)

    def test_gradients_of_chosen_weights(self):
        def loop(model, _):
            some = [model.blocks[0].attn.q.weight, model.blocks[2].mlp[0].bias, model.embed.weight]
            seen = []
            for step in range(2):
                loss = model(*data(step)).pow(2).mean()
                seen += torch.autograd.grad(loss, some)
                loss = model(*data(step + 5)).mean()
                loss.backward(inputs=some[:2])
                seen += [p.grad.clone() for p in some[:2]]
                with torch.no_grad():
                    some[0].add_(0.1)
            return seen
        compare(dit(layers=4), loop, 2)

    def test_second_derivatives_are_refused(self):
        model = dit(layers=3)()
        fake_device.offload(model, fake_device.budget_of(model, 2))
        x, t = data(0)
        x.requires_grad_()
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH), self.assertRaisesRegex(
                ballast.UsageError, r"create_graph=True is not supported .* blocks\.2"):
            torch.autograd.grad(model(x, t).pow(2).mean(), x, create_graph=True)

    def test_autocast_has_the_same_bits(self):
        def loop(model, _):
            seen, optimizer = [], sgd(model)
            for step in range(2):
                x, t = data(step)
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = (model(x, t).float() - x).pow(2).mean()
                loss.backward()
                optimizer.step()
                seen.append(loss.detach())
            return seen

        for make in (dit(layers=4), dit(True, False, layers=4), dit(False, True, layers=4)):
            with self.assertWarnsRegex(UserWarning, "autocast"):
                compare(make, loop, 2)


class Changes(unittest.TestCase):
    """Weights that are changed between passes."""

    def test_a_change_between_forward_and_backward_is_found(self):
        model = dit(layers=3)()
        fake_device.offload(model, fake_device.budget_of(model, 2))
        loss = model(*data(0)).mean()
        with torch.no_grad():
            model.blocks[0].attn.q.weight.add_(1.0)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            loss.backward()

    def test_every_way_of_writing_is_seen(self):
        def write(model):
            with torch.no_grad():
                model.blocks[0].attn.q.weight.add_(1.0)
                model.blocks[0].attn.k.weight[3] = 2.0
            model.blocks[1].attn.q.weight.data.mul_(2.0)
            model.blocks[2].attn.q.weight.data = torch.ones(WIDTH, WIDTH)
            model.blocks[3].attn.q.weight.detach().numpy()[:] = 0.5
            torch._foreach_mul_([model.blocks[0].mlp[0].weight.data, model.blocks[1].mlp[0].weight.data], 1.5)

        def loop(model, _):
            return train(model, 2, each=lambda step: write(model))
        for blocks in (1, 8):  # with and without copies that stay on the device
            compare(dit(layers=4), loop, blocks)

    def test_an_older_alias_is_the_weight(self):
        plain, model = dit(layers=3)(), dit(layers=3)()
        fake_device.offload(model, fake_device.budget_of(model, 2))
        alias = model.blocks[2].mlp[0].weight.detach()
        same(train(plain, 2), train(model, 2))
        same(plain.blocks[2].mlp[0].weight, alias)
        same(state(plain), state(model))


class Budgets(unittest.TestCase):
    def test_one_block_and_more_than_all(self):
        for blocks in (1, 100):
            _, handle = compare(dit(True, layers=4), lambda model, _: train(model, 3), blocks, trained="keep")
            report = handle.report()
            self.assertLessEqual(report.pool_bytes, report.host_bytes)

    def test_too_small(self):
        with self.assertRaisesRegex(ballast.OutOfMemoryError, r"device_bytes: 1000 bytes cannot hold blocks\.0"):
            fake_device.offload(dit()(), 1000)

    def test_blocks_inside_each_other_do_not_fit(self):
        model = dit(layers=2)()
        budget = fake_device.budget_of(model, 0.7)
        handle = fake_device.offload(model, budget, blocks=["blocks.0", "blocks.0.mlp", "blocks.1", "blocks.1.mlp"])
        with self.assertRaisesRegex(ballast.OutOfMemoryError, r"cannot hold blocks\.0\.mlp in addition to blocks\.0"):
            model(*data(0))
        handle.remove()
        same(dit(layers=2)()(*data(0)), model(*data(0)))

    def test_many_steps_with_late_copies(self):
        compare(dit(layers=4), lambda model, _: train(model, 40), 2, delay=0.0002, seed=3, strict=False)


if __name__ == "__main__":
    unittest.main()
