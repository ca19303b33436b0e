"""ballast.offload(): twenty steps of models of transformers and diffusers, with one or two blocks on the device. Losses,
gradients and weights have the bits of the plain model. Needs torch."""

import importlib.util
import unittest

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest(f"needs PyTorch: {error}")

from torch import nn

import ballast
from offload_models import WIDTH, compare, llama, sgd, tokens

STEPS = 20


def needs(*packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return unittest.skipIf(missing, f"{', '.join(missing)} is not installed")


def twenty_steps(loss_of, make_optimizer=sgd, each=None):
    """A loop for compare(): the losses and the gradients of all steps."""
    def loop(model, handle):
        optimizer = make_optimizer(model)
        seen = []
        for step in range(STEPS):
            loss = loss_of(model, step)
            loss.backward()
            seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
            if each is not None:
                seen.append(each(model, step))
        if hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
        return seen
    return loop


def of_text(model, step):
    return model(input_ids=tokens(step), labels=tokens(step)).loss


@needs("transformers")
class OfTransformers(unittest.TestCase):
    def test_gpt2(self):
        from transformers import GPT2Config, GPT2LMHeadModel

        def make():
            torch.manual_seed(0)
            return GPT2LMHeadModel(GPT2Config(n_embd=WIDTH, n_layer=8, n_head=4, vocab_size=128, n_positions=64,
                                              resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0,
                                              eos_token_id=1))
        compare(make, twenty_steps(of_text), 1)

    def test_llama_with_offloaded_states(self):
        for overlap in (False, True):
            compare(lambda: llama(8), twenty_steps(
                of_text, lambda model: ballast.OffloadAdamW(model, lr=1e-2, overlap=overlap)), 1)

    def test_mixture_of_experts(self):
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        def make():
            torch.manual_seed(0)
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(
                vocab_size=128, hidden_size=WIDTH, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=8,
                num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2))
        compare(make, twenty_steps(of_text), 1)

    def test_images(self):
        from transformers import ViTConfig, ViTForImageClassification

        def make():
            torch.manual_seed(0)
            return ViTForImageClassification(ViTConfig(
                hidden_size=WIDTH, num_hidden_layers=8, num_attention_heads=4, intermediate_size=64, image_size=16,
                patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))

        def loss_of(model, step):
            torch.manual_seed(step)
            return model(pixel_values=torch.randn(2, 3, 16, 16), labels=torch.tensor([step % 2, 1])).loss
        compare(make, twenty_steps(loss_of), 1)


@needs("diffusers", "peft")
class OfDiffusers(unittest.TestCase):
    def test_lora_of_double_and_single_blocks_with_samples(self):
        from diffusers import FluxTransformer2DModel
        from peft import LoraConfig

        def make():
            torch.manual_seed(0)
            model = FluxTransformer2DModel(
                patch_size=1, in_channels=8, num_layers=4, num_single_layers=4, attention_head_dim=16,
                num_attention_heads=2, joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, axes_dims_rope=(4, 4, 8))
            model.requires_grad_(False)
            model.add_adapter(LoraConfig(r=2, lora_alpha=4, init_lora_weights="gaussian",
                                         target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
            return model

        def velocity(model, step):
            torch.manual_seed(step)
            return model(hidden_states=torch.randn(1, 9, 8), encoder_hidden_states=torch.randn(1, 5, WIDTH),
                         pooled_projections=torch.randn(1, WIDTH), timestep=torch.rand(1), img_ids=torch.zeros(9, 3),
                         txt_ids=torch.zeros(5, 3), return_dict=False)[0]

        def sample(model, step):
            with torch.no_grad():
                return velocity(model, 1000 + step)

        def optimizer(model):
            return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

        compare(make, twenty_steps(lambda model, step: velocity(model, step).pow(2).mean(), optimizer, sample), 2)


class Plain(unittest.TestCase):
    def test_sequential(self):
        def make():
            torch.manual_seed(0)
            return nn.Sequential(*[nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
                                   for _ in range(8)])

        def loss_of(model, step):
            torch.manual_seed(step)
            return (model(torch.randn(4, WIDTH)) - 1).pow(2).mean()
        compare(make, twenty_steps(loss_of), 1)


if __name__ == "__main__":
    unittest.main()
