import torch, phalanx, copy, warnings
import torch.nn as nn
def work(rank, world, view, kind):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(8,16), nn.ReLU(), nn.Linear(16,16), nn.ReLU(), nn.Linear(16,4))
    ref = copy.deepcopy(m)
    D = phalanx.DistributedDataParallel if kind=="ours" else nn.parallel.DistributedDataParallel
    d = D(m, gradient_as_bucket_view=view, bucket_cap_mb=0.0005)
    o = torch.optim.Adam(d.parameters(), 1e-2)
    torch.manual_seed(1)
    for i in range(6):
        x=torch.randn(world*3,8); y=torch.randn(world*3,4)
        o.zero_grad(set_to_none=i%2==0)
        ((d(x[rank*3:rank*3+3])-y[rank*3:rank*3+3])**2).mean().backward()
        o.step()
    if kind=="ours" and rank==0: print(d.stats()); print(d.plan)
    return [p.detach().clone() for p in d.parameters()]
