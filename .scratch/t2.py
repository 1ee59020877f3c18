import sys; sys.path[:0]=['.','.scratch']
import torch, math, time
from compiled_sampler.batch import *
from compiled_sampler.modes import mode_table, uncovered
from compiled_sampler.params import SamplingParams
from compiled_sampler.pipeline import sample_step, first_of_order
from compiled_sampler import noise, mass, order, draw, wide
def table(params,V,dev='cpu'):
    g=[p.is_greedy for p in params]
    T=lambda v,d: torch.tensor(v,dtype=d,device=dev)
    return SlotTable(T([ (p.seed or 0) for p in params],torch.int64),
      T([1.0 if x else math.log2(math.e)/p.temperature for p,x in zip(params,g)],torch.float32),
      T([0. if x else 1. for x in g],torch.float32),
      T([1 if x else (p.top_k if 0<p.top_k<V else V) for p,x in zip(params,g)],torch.int64),
      T([1. if x else p.top_p for p,x in zip(params,g)],torch.float64),
      T([-math.inf if x or p.min_p==0 else math.log2(p.min_p) for p,x in zip(params,g)],torch.float32))
def run_all(V,R,seed=0,base='top_k'):
    torch.manual_seed(seed)
    import random; rnd=random.Random(seed)
    params=[SamplingParams(rnd.choice([0.,.3,.7,1.,1.5]),rnd.choice([0,1,2,5,50,64,65,1000]),rnd.choice([1.,.9,.5,.99,.01]),rnd.choice([0.,.05,.5,1.]),seed=i) for i in range(R)]
    x=torch.randn(R,V)*3
    x=x.bfloat16().float()
    x[torch.rand(R,V)<.02]=-math.inf
    if R>6: x[1]=-math.inf; x[2,V//2]=math.nan; x[3,::3]=math.inf; x[4]=1.; x[5]=0.
    tb=table(params,V); pos=torch.arange(R); slots=torch.arange(R); slots[-1]=-1
    res={}
    for m in mode_table(V,base):
        t=time.time(); o=sample_step(m,SampleInputs(x,slots,pos,tb)); dt=time.time()-t
        ok=torch.tensor([uncovered(m,p) is None for p in params])
        res[m.name]=(o,ok); 
    full=res['full'][0]
    for n,(o,ok) in res.items():
        bad=((o.token_ids!=full.token_ids)|(o.status!=full.status))&ok
        if bad.any(): print(V,n,'BAD',bad.sum(), bad.nonzero().flatten()[:5], ok.sum()); i=bad.nonzero()[0].item(); print(params[i], o.token_ids[i],full.token_ids[i],o.status[i],full.status[i])
    # oracle
    bad=0
    for i,p in enumerate(params[:-1]):
        xi=torch.where(x[i].isnan(),-math.inf,x[i]); xd=xi.double()
        srt=sorted(range(V),key=lambda j:(-xd[j].item(),j))
        k=1 if p.is_greedy else (p.top_k or V)
        if xd.max()==-math.inf: tok=-1
        else:
            mx=xd.max()
            if mx==math.inf: xd=torch.where(xd==mx,0.,-math.inf)
            else: xd=xd-mx
            w=torch.exp(xd/(p.temperature or 1.))
            kept=[];tot=sum(w[j].item() for j in (srt[:k] if base=='top_k' else srt));acc=0.
            for r,j in enumerate(srt[:k]):
                if (p.top_p<1 and not acc<p.top_p*tot and not p.is_greedy) : break
                if p.min_p>0 and not p.is_greedy and w[j]<p.min_p: break
                kept.append(j); acc+=w[j].item()
            kept=kept or srt[:1]
            if p.is_greedy: tok=kept[0]
            else:
                kk=noise.noise_keys(tb.seeds[i:i+1],pos[i:i+1],0)
                ids=torch.tensor(kept,dtype=torch.int32)
                G=noise.gumbel(kk,ids).double()
                sc=(torch.zeros(len(kept),dtype=torch.float64) if mx==math.inf else xi[kept].double()*tb.scale[i].double())+G
                sc=torch.where(torch.tensor([xi[j]>-math.inf for j in kept]),sc,-math.inf)
                tok=kept[int(sc.argmax())]
        if tok!=full.token_ids[i]: bad+=1; print('oracle',V,i,p,tok,full.token_ids[i].item(), full.status[i].item())
    print(V,base,'oracle mismatches',bad)
if __name__=='__main__':
    for V in (1,2,63,64,127,129,600,5000): 
        for b in ('top_k','all'): run_all(V,40,V,b)
