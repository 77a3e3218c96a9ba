import os, time
import torch, torch.distributed as dist
import torch.distributed.rpc as rpc
from tests.cluster import run_ranks
def fn(rank, world):
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=world)
    r = rpc.rpc_sync(f"w{(rank+1)%world}", torch.add, args=(torch.ones(2), 1)).tolist()
    rpc.shutdown()
    return r
def test_rpc():
    for i in range(3): assert run_ranks(3, fn, backend=None, allow_leaks=["native_threads","memfd"]) == [[2.0,2.0]]*3
def ddp(rank, world):
    m=torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3,3))
    for _ in range(3): m(torch.ones(2,3)).sum().backward()
    from torch.distributed.optim import ZeroRedundancyOptimizer as Z
    z=Z(m.parameters(), torch.optim.Adam, lr=.1); z.step()
    return os.getpid()
def test_ddp():
    a=run_ranks(2, ddp); assert run_ranks(2,ddp)==a
def comp(rank, world):
    m=torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3,3))
    c=torch.compile(m, backend="aot_eager")
    for _ in range(3): c(torch.ones(2,3)).sum().backward()
def test_compile():
    t=time.time(); run_ranks(2, comp); print(time.time()-t);t=time.time(); run_ranks(2,comp); print(time.time()-t)
def test_many():
    t=time.time()
    for i in range(150): run_ranks(2+i%3, ddp)
    print('per call', (time.time()-t)/150)
