"""What must hold of every toolkit's encoder with replaced attention.

A test file makes a class of `Battery` and says how its toolkit's encoder is built and run. Toolkits
that do not install here are stood in for by tests/standins, own code with the toolkit's class names
and its calls; an installed toolkit comes before them.
"""

import copy
import inspect
import math
import pickle

import pytest
import torch
from host_cases import HostCase
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from ldsa_nn import LocalDenseSynthesizerAttention, load_replaced, replace_attention

D, H, T, LAYERS = 16, 4, 24, 2
LENGTHS = [T, 13, 1]


def batch():
    torch.manual_seed(1)
    return torch.randn(len(LENGTHS), T, D), torch.tensor(LENGTHS)


class Battery:
    """Tests of one encoder.

    paths: where its attentions are. warned: words that the report's warning must have.
    """

    paths: list[str]
    warned: list[str]

    def build(self, dropout=0.0):
        """The toolkit's encoder for features [B,T,D], LAYERS layers of H heads."""
        raise NotImplementedError

    def run(self, model, x, lengths):
        """Frames [B,T,D] of the encoder."""
        raise NotImplementedError

    def original(self, **options):
        torch.manual_seed(0)
        return self.build(**options).eval()

    def replaced(self, left=3, right=2, dropout=0.0, **options):
        model = self.original(dropout=dropout)
        torch.manual_seed(2)
        replace_attention(model, left=left, right=right, **{"use_bias": True, **options})
        return model.eval()

    def alone(self, model, x, lengths):
        return [
            self.run(model, x[b : b + 1, :n], lengths[b : b + 1])[0] for b, n in enumerate(LENGTHS)
        ]

    def error(self, model, garbage=0.0):
        """How far the padded batch is from each utterance alone."""
        x, lengths = batch()
        outside = torch.arange(T) >= lengths[:, None]
        padded = x.masked_fill(outside[:, :, None], garbage)
        with torch.no_grad():
            together = self.run(model, padded, lengths)
            alone = self.alone(model, x, lengths)
        return max((together[b, :n] - alone[b]).abs().max() for b, n in enumerate(LENGTHS))

    def test_report(self):
        model = self.original()
        report = replace_attention(model)
        assert report.replaced == self.paths
        parts = {name.removeprefix(path) for path in self.paths for name in report.new_parameters}
        assert {f".layer.{w}.weight" for w in ("w1", "w2")} <= parts
        assert set(report.new_parameters) <= set(dict(model.named_parameters()))
        text = "\n".join(report.warnings)
        assert "window does not follow" in text
        assert all(word in text for word in self.warned), text
        with pytest.raises(ValueError, match="replaced already"):
            replace_attention(model)

    def test_a_padded_batch_is_each_utterance_alone(self):
        assert self.error(self.replaced(edge="zero"), garbage=50.0) < 1e-5
        assert self.error(self.replaced(edge="renormalize"), garbage=50.0) < 1e-5
        # A control that ignores the mask is far off: the comparison can fail.
        assert self.error(self.replaced(honor_mask=False), garbage=50.0) > 1e-3
        # And the original does as the replaced model does.
        assert self.error(self.original(), garbage=50.0) < 1e-5

    def test_the_layer_is_what_runs(self):
        model = self.replaced()
        x, lengths = batch()
        before = self.run(model, x, lengths)
        for path in self.paths:
            nn.init.normal_(model.get_submodule(path).layer.w2.weight)
        assert (self.run(model, x, lengths) - before).abs().max() > 1e-3

    def test_training_on_a_padded_batch(self):
        model = self.replaced(dropout=0.1).train()
        x, lengths = batch()
        x.requires_grad_()
        out = self.run(model, x, lengths)
        inside = torch.arange(T) < lengths[:, None]
        out[inside].square().sum().backward()
        layers = [model.get_submodule(path).layer for path in self.paths]
        for layer in layers:
            assert layer.dropout_rate == 0.1
            for parameter in layer.parameters():
                assert parameter.grad.isfinite().all() and parameter.grad.any()
        assert (x.grad[~inside] == 0).all() and x.grad[inside].any()

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_checkpointing_repeats_the_dropout(self, use_reentrant):
        model = self.replaced(dropout=0.3).train()
        x, lengths = batch()
        x.requires_grad_()

        def gradients(call):
            torch.manual_seed(3)
            model.zero_grad()
            call(lambda x: self.run(model, x, lengths), x).square().sum().backward()
            return [p.grad for p in model.parameters() if p.grad is not None]

        plain = gradients(lambda function, x: function(x))
        again = gradients(lambda f, x: checkpoint(f, x, use_reentrant=use_reentrant))
        assert len(plain) == len(again) > 0
        for one, other in zip(plain, again, strict=True):
            assert torch.equal(one, other)

    def test_save_and_load(self, tmp_path):
        options = dict(left=[4, 2], right=1, edge="renormalize")
        model = self.replaced(**options)
        torch.save(model.state_dict(), tmp_path / "model.pt")
        x, lengths = batch()
        expected = self.run(model, x, lengths)
        torch.manual_seed(7)
        fresh = self.build().eval()
        load_replaced(fresh, tmp_path / "model.pt", use_bias=True, **options)
        assert torch.equal(self.run(fresh, x, lengths), expected)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(self.run(copied, x, lengths), expected)
        with pytest.raises(RuntimeError, match=r"Missing key.*layer\.w1\.weight"):
            load_replaced(self.build(), self.original().state_dict())

    def test_masks_are_not_read_back(self):
        # On a device that has no values, as they must not be waited for on a GPU.
        model, calls = self.replaced(), []
        adapter = model.get_submodule(self.paths[0])
        hook = adapter.register_forward_pre_hook(
            lambda _, arguments, options: calls.append((arguments, options)), with_kwargs=True
        )
        self.run(model, *batch())
        hook.remove()
        arguments, options = tree_map_only(torch.Tensor, lambda x: x.to("meta"), calls[0])
        adapter.to("meta")(*arguments, **options)

    def test_masks_of_another_shape_or_kind_are_refused(self):
        model, calls = self.replaced(), []
        adapter = model.get_submodule(self.paths[0])
        hook = adapter.register_forward_pre_hook(
            lambda _, arguments, options: calls.append((arguments, options)), with_kwargs=True
        )
        self.run(model, *batch())
        hook.remove()
        arguments, options = calls[0]
        given = inspect.signature(adapter.forward).bind(*arguments, **options).arguments
        (name,) = [name for name in given if "mask" in name and given[name] is not None]
        mask = given[name]
        for wrong in (mask[..., :-1], mask[:1], mask.flatten()[:T], mask.flatten()[0]):
            with pytest.raises(ValueError, match="shape"):
                adapter(**{**given, name: wrong})
        for wrong in ("mask", [True], T):
            with pytest.raises(TypeError, match=r"mask must be a .*tensor.*, got (str|list|int)"):
                adapter(**{**given, name: wrong})

    def test_one_layer_alone(self):
        model = self.original()
        report = replace_attention(model, layers=[1], left=3, right=2)
        assert report.replaced == self.paths[1:2]
        assert self.run(model, *batch()).isfinite().all()

    def test_subclasses_are_unknown(self):
        model = self.original()
        parent, _, name = self.paths[-1].rpartition(".")
        old = getattr(model.get_submodule(parent), name)
        old.__class__ = type("Mine", (type(old),), {})
        with pytest.raises(ValueError, match=f"{name}.*Mine"):
            replace_attention(model)


def host_cases(rows):
    """The batteries in a test file's ROWS, {name in the README's table: (battery, its stream)}."""
    return [
        HostCase(name, kind().original, (D,), [T, 13], kind().run, streamed=streamed)
        for name, (kind, streamed) in rows.items()
    ]


class ModuleBattery(Battery):
    """Of attentions that any layer can stand in for."""

    def test_one_frame_keeps_what_it_was(self):
        # Alone, a frame attends to itself: attention gives out(value(x)), as a window of one does.
        model = self.original()
        for name, parameter in model.named_parameters():
            if "norm" not in name and parameter.dim() < 3:
                nn.init.normal_(parameter, std=0.3)
        x, lengths = torch.randn(1, 1, D), torch.tensor([1])
        expected = self.run(model, x, lengths)
        replace_attention(model, left=0, right=0, init_from_old=True, use_bias=True)
        torch.testing.assert_close(self.run(model, x, lengths), expected)

    def test_nan_in_padding_stays_there(self):
        # As far as the attention goes: the modules around it may let it pass.
        model = self.replaced()
        seen = []
        for path in self.paths:
            layer = model.get_submodule(path).layer
            layer.register_forward_hook(lambda _, inputs, out: seen.append((inputs[0], out)))
        x, lengths = batch()
        padding = torch.arange(T) >= lengths[:, None]
        self.run(model, x, lengths)
        assert len(seen) == LAYERS
        for _, out in seen:
            assert (out[padding] == 0).all() and out[~padding].abs().min() > 0
        layer = model.get_submodule(self.paths[0]).layer
        x = seen[0][0]
        clean = layer(x, mask=~padding)
        dirty = layer(x.masked_fill(padding[:, :, None], math.nan), mask=~padding)
        assert torch.equal(dirty[~padding], clean[~padding])

    def test_what_a_layer_of_make_is_given(self):
        class Recorder(LocalDenseSynthesizerAttention):
            def forward(self, query, key, value, mask=None, lengths=None):
                seen.append((query, key, value, mask, lengths))
                return super().forward(query, key, value, mask)

        seen = []
        model = self.original()
        replace_attention(
            model,
            left=3,
            right=2,
            make=lambda path, old, n_head, n_feat, left, right: Recorder(
                n_head, n_feat, left=left, right=right
            ),
        )
        x, lengths = batch()
        self.run(model, x, lengths)
        assert len(seen) == LAYERS
        for query, key, value, mask, no_lengths in seen:
            assert query.shape == (len(LENGTHS), T, D)
            assert torch.equal(query, key) and torch.equal(query, value)
            assert mask.dtype == torch.bool
            assert torch.equal(mask, torch.arange(T) < lengths[:, None])
            assert no_lengths is None
