import sys; sys.path[:0]=['.','.scratch']
import torch
from t2 import table
from compiled_sampler import SamplingParams
from compiled_sampler.wide import sorted_threshold
import random
from compiled_sampler.wide_triton import wide_search
def go(dev,V,R,dt,base):
    torch.manual_seed(V); rnd=random.Random(V)
    params=[SamplingParams(rnd.choice([.3,.7,1.,1.5]),rnd.choice([0,2,5,50,64,65,max(1,V//2)]),rnd.choice([1.,.9,.5,.99,.01]),seed=i) for i in range(R)]
    x=(torch.randn(R,V+3)*3).bfloat16().float(); x[torch.rand(R,V+3)<.02]=-float('inf'); x[:, V:]=99
    if R>4: x[1,V//2]=float('nan'); x[2,::3]=float('inf'); x[3]=1.; x[4]=-0.
    x=x.to(dt).to(dev); tb=table(params,V,dev)
    packed=torch.zeros(R,dtype=torch.int64,device=dev); pend=torch.ones(R,dtype=torch.bool,device=dev); pend[-1]=False
    want=sorted_threshold(x,tb.scale,tb.top_k,tb.top_p,vocab_size=V,base_is_row=base)
    got=wide_search(x,packed,pend,tb.scale,tb.top_k,tb.top_p,V,base)
    off=torch.tensor([(p.top_k==0 or p.top_k>=V) and p.top_p==1. for p in params]).to(dev)|~pend
    bad=((want!=got)&~off).nonzero().flatten().tolist()
    print(dev,V,R,dt,base,'bad',bad, 'pend0 kept', got[-1].item()==0)
    for b in bad[:3]: print(params[b],want[b].item()>>32,want[b].item()&0x7fffffff,got[b].item()>>32,got[b].item()&0x7fffffff)
if __name__=='__main__':
    dev=sys.argv[1]
    for V in ((2,127,129,1000,5000) if dev=='cpu' else (2,127,129,1000,5000,151936)):
        for dt in (torch.float32,torch.bfloat16):
            for base in (False,True): go(dev,V,8 if dev=='cpu' else 64,dt,base)
