import sys; sys.path[:0]=['.','.scratch']
import torch,time,random,math
from t2 import table
from compiled_sampler.batch import *
from compiled_sampler.modes import mode_table, uncovered
from compiled_sampler.params import SamplingParams
from compiled_sampler.pipeline import sample_step
from compiled_sampler.lowering import CompiledStages
def inputs(V,R,dtype=torch.float32,seed=0,dev='cpu'):
    torch.manual_seed(seed); rnd=random.Random(seed)
    params=[SamplingParams(rnd.choice([0.,.3,.7,1.,1.5]),rnd.choice([0,1,2,5,50,64,65,1000]),rnd.choice([1.,.9,.5,.99,.01]),rnd.choice([0.,.05,.5,1.]),seed=i) for i in range(64)]
    x=torch.randn(R,V)*3; x=x.bfloat16().float()
    x[torch.rand(R,V)<.02]=-math.inf
    if R>6: x[1]=-math.inf; x[2,V//2]=math.nan; x[3,::3]=math.inf; x[4]=1.; x[5]=0.
    slots=torch.randint(-1,64,(R,))
    return SampleInputs(x.to(dtype).to(dev),slots.to(dev),torch.randint(0,1<<40,(R,)).to(dev),table(params,V,dev)),params
def main(dev='cpu',Vs=(129,5000),Rs=(256,1,7,3,64)):
  for V in Vs:
   for base in ('top_k','all'):
    stages=CompiledStages()
    for m in mode_table(V,base):
      for R in Rs:
        for dt in (torch.float32,torch.bfloat16) if base=='top_k' else (torch.float32,):
            i,params=inputs(V,R,dt,R,dev)
            t=time.time(); a=sample_step(m,i); t1=time.time(); b=sample_step(m,i,stages); t2=time.time(); b=sample_step(m,i,stages); t3=time.time()
            bad=((a.token_ids!=b.token_ids)|(a.status!=b.status)).sum().item()
            print(V,base,m.name,R,dt,'bad',bad,'eager %.1f ms first %.1f s then %.2f ms'%((t1-t)*1e3,t2-t1,(t3-t2)*1e3),flush=True)
if __name__=='__main__': main()
