"""Adversary: each case trains, saves, and loads by DeepSpeed itself and directly; full snapshots are compared."""
from __future__ import annotations
import collections, hashlib, os, shutil, types
import torch
from cases import Model, Run, ds_config
from jobs import Net, _groups, _optimizer, batch, forget, place

class Odd(torch.nn.Module):
    """Odd tensors of all kinds."""
    def __init__(self, conv=True):
        super().__init__()
        self.embed = torch.nn.Embedding(13, 7)
        self.scalar = torch.nn.Parameter(torch.ones(1))
        self.empty = torch.nn.Parameter(torch.zeros(0, 4))
        self.norm = torch.nn.BatchNorm1d(7)
        self.wn = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(7, 7))
        self.register_buffer("ints", torch.arange(5))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("nothing", None)
        self.register_buffer("volatile", torch.rand(3), persistent=False)
        self.register_buffer("turned", torch.rand(4, 3))
        self.register_buffer("cplx", torch.rand(3, dtype=torch.complex64))
        self.register_buffer("f64", torch.rand(3, dtype=torch.float64))
        self.a = torch.nn.Linear(7, 7); self.b = self.a
        self.head = torch.nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, tokens, labels):
        h = self.embed(tokens)
        h = self.wn(h) * self.scalar
        h = self.norm(h.to(self.norm.weight.dtype)).to(h.dtype) if self.norm.weight.dtype == self.norm.running_mean.dtype else h
        with torch.no_grad():
            self.ints += 1
            self.f64 += 0.5
            self.turned.add_(1)
        return torch.nn.functional.cross_entropy(self.head(self.b(self.a(h))).float(), labels)

class Conv(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.c = torch.nn.Conv2d(2, 3, 2)
        self.l = torch.nn.Linear(3, 13)
    def forward(self, tokens, labels):
        x = tokens.to(self.l.weight.dtype)[:, None, None, None].repeat(1, 2, 3, 3)
        return torch.nn.functional.cross_entropy(self.l(self.c(x).mean((2, 3))).float(), labels)

class Unused(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 13); self.never = torch.nn.Linear(4, 4)
    def forward(self, tokens, labels):
        x = tokens.to(self.a.weight.dtype)[:, None].repeat(1, 4)
        return torch.nn.functional.cross_entropy(self.a(x).float(), labels)

class LSTM(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.e = torch.nn.Embedding(13, 5); self.r = torch.nn.LSTM(5, 6, 2, batch_first=True); self.l = torch.nn.Linear(6, 13)
    def forward(self, tokens, labels):
        y, _ = self.r(self.e(tokens)[:, None].repeat(1, 3, 1))
        return torch.nn.functional.cross_entropy(self.l(y[:, -1]).float(), labels)

class Extra(torch.nn.Module):
    """extra state of several kinds"""
    def __init__(self, n=0):
        super().__init__()
        self.l = torch.nn.Linear(4, 13); self.n = n
        self.inner = Inner(n)
    def get_extra_state(self): return torch.tensor([self.n, 3])
    def set_extra_state(self, s): self.n = int(s[0])
    def forward(self, tokens, labels):
        self.n += 1; self.inner.n += 2
        x = tokens.to(self.l.weight.dtype)[:, None].repeat(1, 4)
        return torch.nn.functional.cross_entropy(self.l(x).float(), labels)
class Inner(torch.nn.Module):
    def __init__(self, n): super().__init__(); self.n = n
    def get_extra_state(self): return {"n": self.n, "t": torch.tensor([self.n])}
    def set_extra_state(self, s): self.n = s["n"]; self.t = s["t"]

class Hooked(torch.nn.Module):
    """pre hook, post hook, renames, drops keys, state_dict hook that adds entries"""
    def __init__(self):
        super().__init__()
        self.l = torch.nn.Linear(4, 13); self.calls = []; self.register_buffer("cache", torch.zeros(2))
        self._register_state_dict_hook(lambda m, s, p, _: s.__setitem__(p + "note", "text"))
        self._register_load_state_dict_pre_hook(lambda s, p, *r: (self.calls.append(("pre", sorted(s))), s.pop(p + "note", None)))
        self.register_load_state_dict_post_hook(lambda m, k: m.calls.append(("post", list(k.missing_keys), list(k.unexpected_keys))))
    def forward(self, tokens, labels):
        x = tokens.to(self.l.weight.dtype)[:, None].repeat(1, 4)
        with torch.no_grad(): self.cache += 1
        return torch.nn.functional.cross_entropy(self.l(x).float(), labels)

class Writes(torch.nn.Module):
    """Adds an entry that it does not load (non-strict loads only)"""
    def __init__(self):
        super().__init__(); self.l = torch.nn.Linear(4, 13)
        self._register_state_dict_hook(lambda m, s, p, _: s.__setitem__(p + "more", torch.ones(2)))
    forward = Unused.forward
    @property
    def a(self): return self.l

class Turns(torch.nn.Module):
    """b is frozen until the save"""
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 4); self.l = torch.nn.Linear(4, 13)
    def forward(self, tokens, labels):
        return torch.nn.functional.cross_entropy(self.l(self.a(tokens.to(self.l.weight.dtype)[:, None].repeat(1, 4))).float(), labels)

class Mixed(torch.nn.Module):
    def __init__(self, dtypes=(torch.float32, torch.float64)):
        super().__init__()
        self.a = torch.nn.Linear(4, 4).to(dtypes[0]); self.l = torch.nn.Linear(4, 13).to(dtypes[1])
    def forward(self, tokens, labels):
        x = self.a(tokens.to(self.a.weight.dtype)[:, None].repeat(1, 4))
        return torch.nn.functional.cross_entropy(self.l(x.to(self.l.weight.dtype)).float(), labels)

def adam(net): return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
def adam_all(net): return torch.optim.AdamW(net.parameters(), lr=0.01)

OPT = {n: (lambda net, c=c, k=k: c([p for p in net.parameters() if p.requires_grad], **k)) for n, (c, k) in {
    "sgd": (torch.optim.SGD, {"lr": .1}), "sgdm": (torch.optim.SGD, {"lr": .1, "momentum": .9}),
    "nesterov": (torch.optim.SGD, {"lr": .1, "momentum": .9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": .01}), "amsgrad": (torch.optim.Adam, {"lr": .01, "amsgrad": True}),
    "maximize": (torch.optim.Adam, {"lr": .01, "maximize": True}),
    "adamax": (torch.optim.Adamax, {}), "nadam": (torch.optim.NAdam, {}), "radam": (torch.optim.RAdam, {}),
    "adagrad": (torch.optim.Adagrad, {}), "adadelta": (torch.optim.Adadelta, {}), "asgd": (torch.optim.ASGD, {}),
    "rprop": (torch.optim.Rprop, {}), "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": .5}),
    "adafactor": (getattr(torch.optim, "Adafactor", None), {}), "tensorlr": (torch.optim.AdamW, {"lr": torch.tensor(0.01), "foreach": False}),
    "foreach": (torch.optim.AdamW, {"foreach": True}), "capt": (torch.optim.AdamW, {"capturable": False, "fused": True}),
}.items() if c}

class Eight(torch.optim.Optimizer):
    """bitsandbytes-like: uint8 states in shape of the parameter, absmax blocks, maps; small ones fp32."""
    def __init__(self, params, lr=.01): super().__init__(params, {"lr": lr})
    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None: continue
                s = self.state[p]
                if not s:
                    s["step"] = 0
                    if p.numel() >= 20:
                        s["state1"] = torch.zeros(p.shape, dtype=torch.uint8); s["qmap1"] = torch.linspace(-1, 1, 256)
                        s["absmax1"] = torch.zeros(-(-p.numel() // 8))
                    else:
                        s["state1"] = torch.zeros_like(p, dtype=torch.float32)
                s["step"] += 1
                if "absmax1" in s:
                    s["state1"] = (p.detach().abs() * 40).clamp(0, 255).to(torch.uint8); s["absmax1"] += s["step"]
                else: s["state1"].mul_(.9).add_(p.grad.float())
                p.add_(p.grad, alpha=-g["lr"])

class Prodigy(torch.optim.AdamW):
    """keeps d in the group; by rank"""
    def step(self, closure=None):
        super().step(closure)
        for g in self.param_groups:
            g["d"] = g.get("d", 1e-6) * (1.5 + torch.distributed.get_rank()); g["k"] = g.get("k", 0) + 1

def net(kind):
    if kind.startswith("net:"): return Net(Model(**eval(kind[4:] or "{}")))
    n = {"odd": Odd, "conv": Conv, "unused": Unused, "lstm": LSTM, "extra": Extra, "hooked": Hooked, "writes": Writes, "mixed": Mixed, "turns": Turns,
         "f64": lambda: Mixed((torch.float64, torch.float64)), "cl": lambda: Conv().to(memory_format=torch.channels_last)}[kind]()
    return n

class Wrap(torch.optim.Optimizer):
    def __init__(self, inner):
        self.optimizer = inner; self.loads = 0
        self.defaults, self.param_groups, self.state = inner.defaults, inner.param_groups, inner.state
    def step(self, closure=None): return self.optimizer.step(closure)
    def zero_grad(self, set_to_none=True): self.optimizer.zero_grad(set_to_none)
    def state_dict(self): return self.optimizer.state_dict()
    def load_state_dict(self, s):
        self.loads += 1; self.optimizer.load_state_dict(s); self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

def optimizer(kind, n):
    own = [p for p in n.parameters() if p.requires_grad]
    if kind.startswith("model:"): m = Model(**eval(kind[6:])); return _optimizer(m, _groups(n, m))
    if kind == "json": return None
    if kind == "eight": return Eight(own)
    if kind == "prodigy": return Prodigy(own)
    if kind == "wrap": return Wrap(adam(n))
    if kind == "all": return adam_all(n)
    if kind == "frozengroup":
        fr = [p for p in n.parameters() if not p.requires_grad]
        return torch.optim.AdamW([{"params": own, "lr": .01}, {"params": fr, "lr": .5, "weight_decay": .3}])
    if kind == "frozenfirst":
        fr = [p for p in n.parameters() if not p.requires_grad]
        return torch.optim.AdamW([{"params": fr, "lr": .5, "weight_decay": .3}, {"params": own, "lr": .01}])
    if kind == "many": return torch.optim.AdamW([{"params": [p], "lr": .01 * (i + 1)} for i, p in enumerate(own)])
    if kind == "emptygroup": return torch.optim.AdamW([{"params": own, "lr": .01}, {"params": [], "lr": .2}])
    if kind == "named": return torch.optim.AdamW([(x, p) for x, p in n.named_parameters() if p.requires_grad], lr=.01)
    if kind == "hook":
        o = adam(n); o.register_load_state_dict_pre_hook(lambda o, s: o.__dict__.setdefault("seen", []).append(len(s["state"]))); return o
    if kind == "transformers":
        from transformers.optimization import Adafactor
        return Adafactor(own, lr=.01, scale_parameter=False, relative_step=False)
    return OPT[kind](n)

def scheduler(kind, o):
    L = torch.optim.lr_scheduler
    if kind is None or o is None: return None
    return {"lambda": lambda: L.LambdaLR(o, [lambda s: 1 / (1 + s)] * len(o.param_groups)), "cos": lambda: L.CosineAnnealingLR(o, 10),
            "onecycle": lambda: L.OneCycleLR(o, .1, 20), "cyclic": lambda: L.CyclicLR(o, .01, .1, cycle_momentum=False),
            "seq": lambda: L.SequentialLR(o, [L.ConstantLR(o, .1, 2), L.ExponentialLR(o, .9)], [2]),
            "chained": lambda: L.ChainedScheduler([L.ConstantLR(o, .1, 2), L.ExponentialLR(o, .9)]),
            "callable": lambda: None}[kind]()

def build(case, seed):
    import deepspeed
    forget(); torch.manual_seed(seed)
    run = case["run"]; n = net(case["net"])
    config = ds_config(run)
    config.update(case.get("config", {}))
    if case.get("cast"): n = n.to(case["cast"])
    o = optimizer(case.get("opt", "adam"), n)
    s = scheduler(case.get("sched"), o)
    kw = {}
    if case.get("mp"): kw["model_parameters"] = [p for p in n.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=n, optimizer=o, lr_scheduler=s, config=config, dist_init_required=False, **kw)
    if case.get("turn"):
        for p in engine.module.parameters():
            if p.dim() == 4 and not hasattr(p, "ds_tensor"): p.data = p.data.contiguous(memory_format=torch.channels_last)
        for b in engine.module.buffers():
            if b.dim() == 2: b.data = b.data.t().contiguous().t()
    return engine

def train(engine, first, steps):
    rank, dp = place(engine); losses = []
    for step in range(first, first + steps):
        torch.manual_seed(step)
        loss = engine(*batch(step, rank, dp)); engine.backward(loss); engine.step(); losses.append(float(loss.detach()))
    return losses

SKIP = {"timers", "wall_clock_breakdown", "_hook_for_profile", "external_optimizer", "engine", "mpu", "ds_engine", "_grad_acc_hooks", "checkpoint_engine",
        "reduction_stream", "cpu_d2h_stream", "callback_stream", "allgather_comm_stream", "timer_names", "_ds_reshard_refused", "tput_timer", "monitor", "hooks", "param_dict", "params_already_reduced", "param_id", "_param_slice_mappings", "ds_tensor_map", "params_in_partition", "param_to_partition_ids", "grad_partition_insertion_offset", "is_grad_computed", "first_param_index_in_partition", "param_position_map", "grads_in_partition_offset", "grad_start_offset", "is_param_in_current_partition", "grad_position", "_ds_reshard"}

def snap(engine, result):
    out = {}; seen = {}
    names = {p: n for n, p in engine.module.named_parameters()}
    def key(k):
        if isinstance(k, torch.Tensor):
            return f"<{names.get(k, 'T' + str(seen.get(id(k), '?')))}>"
        return repr(k)
    keep = []
    def walk(path, v, depth=0):
        if isinstance(v, torch.Tensor):
            data = getattr(v, "ds_tensor", None)
            if id(v) in seen:
                out[path] = ("ref", seen[id(v)]); return
            seen[id(v)] = path; keep.append(v)
            t = v.detach()
            if t.is_meta:
                out[path] = ("meta", tuple(v.shape)); return
            try: raw = t.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            except Exception: raw = repr(t).encode()
            out[path] = ("T", str(v.dtype), tuple(v.shape), tuple(v.stride()), v.requires_grad, hashlib.md5(raw).hexdigest(), t.flatten()[:3].tolist())
            if data is not None: walk(path + ".ds_tensor", data, depth + 1)
            for a in ("_hp_mapping",):
                if hasattr(v, a): walk(path + "." + a, getattr(v, a), depth + 1)
            return
        if v is None or isinstance(v, (int, float, str, bool, bytes, torch.dtype, torch.device, torch.Size)):
            out[path] = repr(v); return
        if isinstance(v, (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type, types.ModuleType)):
            return
        if id(v) in seen and not isinstance(v, tuple):
            out[path] = ("ref", seen[id(v)]); return
        if not isinstance(v, tuple): seen[id(v)] = path
        keep.append(v)
        if depth > 9: return
        if isinstance(v, dict):
            out[path + "#"] = sorted(key(k) for k in v)
            for n, (k, x) in enumerate(list(v.items())):
                kk = key(k) if isinstance(k, torch.Tensor) else repr(k)
                if isinstance(k, str) and k in SKIP: continue
                walk(f"{path}[{kk}]", x, depth + 1)
            return
        if isinstance(v, (list, tuple, collections.deque)):
            out[path + "#"] = len(v)
            for i, x in enumerate(v): walk(f"{path}[{i}]", x, depth + 1)
            return
        if isinstance(v, (set, frozenset)):
            out[path] = sorted(map(str, v)); return
        mod = type(v).__module__
        if mod.startswith(("deepspeed.comm", "deepspeed.utils.timer", "torch.distributed", "torch._C", "torch.cuda", "logging", "threading", "torch.utils.hooks", "weakref", "deepspeed.utils.nvtx")):
            return
        if isinstance(v, torch.nn.Module) and depth: return
        if hasattr(v, "__dict__"):
            for k, x in list(vars(v).items()):
                if k not in SKIP: walk(f"{path}.{k}", x, depth + 1)
    walk("state", dict(engine.module.state_dict(keep_vars=True)))
    for n, m in engine.module.named_modules():
        for k, x in vars(m).items():
            if not k.startswith("_") and k not in ("ds_grads_remaining", "training", "ds_id", "ds_inflight_param_registry", "_parameters"): walk(f"attr {n}.{k}", x, 3)
    walk("opt", engine.optimizer)
    walk("sched", engine.lr_scheduler)
    for k in ("global_steps", "global_samples", "micro_steps", "skipped_steps", "loaded_checkpoint_dp_world_size", "loaded_checkpoint_mp_world_size", "_step_applied", "gradient_average", "_global_grad_norm"):
        out["engine." + k] = repr(getattr(engine, k, None))
    if getattr(engine, "random_ltd_scheduler", None) is not None: walk("ltd", engine.random_ltd_scheduler)
    p, client = result
    out["path"] = p and os.path.basename(p)
    walk("client", {k: v for k, v in (client or {}).items() if k != "optimizer"}); out["client keys"] = sorted(client or {})
    return out

def one(case, folder, hooks, reshard=None):
    import ds_reshard
    from contextlib import nullcontext
    from ds_reshard.hosts.deepspeed import load as host
    c = dict(case); c["config"] = {**case.get("config", {}), **({"ds_reshard": {"reshard": reshard}} if reshard else {})}
    if case.get("load_config"): c["config"].update(case["load_config"])
    if case.get("load_opt"): c["opt"] = case["load_opt"]
    engine = build(c, 9)
    if case.get("stepped"): train(engine, 50, case["stepped"])
    args = dict(case.get("args", {}))
    if args.get("custom_load_fn"):
        def fn(src, dst): 
            for k in src: 
                if k in dst.state_dict(): dst.state_dict()[k].copy_(src[k])
        args["custom_load_fn"] = lambda src, dst: dst.load_state_dict({k: v * 1 for k, v in src.items()}, strict=False)
    who = []
    orig = type(engine)._load_checkpoint; direct = host._load_directly
    type(engine)._load_checkpoint = lambda *a, **k: (who.append("DS"), orig(*a, **k))[1]
    host._load_directly = lambda *a, **k: (who.append("direct"), direct(*a, **k))[1]
    try:
        with ds_reshard.install("deepspeed") if hooks else nullcontext():
            try:
                result = engine.load_checkpoint(folder, **args)
            except Exception as error:
                return {"error": f"{type(error).__name__}: {error}"[:3000], "who": who}
    finally:
        type(engine)._load_checkpoint = orig; host._load_directly = direct
    s = snap(engine, result)
    after = None
    try:
        after = train(engine, 70, 2)
    except Exception as error:
        after = f"{type(error).__name__}: {error}"[:300]
    s2 = {"weights": {k: hashlib.md5(v.detach().cpu().float().contiguous().numpy().tobytes()).hexdigest() for k, v in engine.module.state_dict().items() if isinstance(v, torch.Tensor) and not v.is_complex()}}
    return {"snap": s, "who": who, "after": after, "later": s2}

def diff(a, b):
    if "error" in a or "error" in b:
        return {"errors": (a.get("error"), b.get("error"))} if a.get("error") != b.get("error") else {}
    d = {k: (a["snap"].get(k), b["snap"].get(k)) for k in {**a["snap"], **b["snap"]} if a["snap"].get(k) != b["snap"].get(k)}
    if str(a["after"]) != str(b["after"]): d["AFTER"] = (a["after"], b["after"])
    if a["later"] != b["later"]: d["LATER WEIGHTS"] = ("", "")
    return d

def still():
    from deepspeed.accelerator import get_accelerator
    get_accelerator().is_fp16_supported = lambda: True
    import deepspeed.runtime.zero.partition_parameters as pp
    if not hasattr(torch, "_adv"):
        torch._adv = torch.empty
        zeros = torch.zeros
        torch.empty = lambda *a, **k: zeros(*a, **{x: y for x, y in k.items() if x not in ("memory_format",)})
        pp._orig_torch_empty = torch.empty

def check(case, folder):
    still()
    rank = torch.distributed.get_rank()
    engine = build(case, 5)
    if case.get("late"): engine.module.a.requires_grad_(False)
    train(engine, 0, case.get("steps", 3))
    if case.get("late"): engine.module.a.requires_grad_(True)
    kw = case.get("save_args", {})
    engine.save_checkpoint(folder, client_state={"note": [1, {"a": torch.arange(3)}]}, **kw)
    torch.distributed.barrier()
    pure = one(case, folder, False)
    direct = one(case, folder, True, None)
    d = diff(pure, direct); noise = []; left = {"who": ["?"]}
    found = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, bool(d))
    if any(found):
        again = one(case, folder, False)
        noise = set(diff(pure, again)); d = {k: v for k, v in d.items() if k not in noise}
        torch.distributed.all_gather_object(found, bool(d))
        if any(found): left = one(case, folder, True, {"unchanged": "deepspeed"})
    return {"noise": len(noise), "left": left["who"], "direct": direct["who"], "pureerr": pure.get("error"), "left diff": {}, "direct diff": d}

def states(case):
    still(); e = build(case, 5); train(e, 0, 2)
    names = {p: n for n, p in e.module.named_parameters()}
    o = e.optimizer
    return [(names.get(p), tuple(p.shape), list(o.state.get(p, {}))) for g in o.param_groups for p in g["params"]]
