import sys,os
sys.path.insert(0, os.path.abspath("tests/hosts")); sys.path.insert(0, os.path.abspath("tests"))
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3])
if __name__=="__main__":
    from worlds import Worlds
    from adv_cases import CASES
    W=Worlds()
    for n in sys.argv[1:]:
        c=next(c for c in CASES if c["name"]==n)
        for x in W[c["run"].dp].run("adv_jobs.states", case=c): print(*x, sep="\n")
    W.close()
