import os, sys, tempfile, traceback, fnmatch
sys.path.insert(0, os.path.abspath("tests/hosts")); sys.path.insert(0, os.path.abspath("tests"))
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3]); os.environ["OMP_NUM_THREADS"] = "1"
import importlib
def main():
    from worlds import Worlds
    from adv_cases import CASES
    pats = sys.argv[1:] or ["*"]
    W = Worlds()
    for case in CASES:
        if os.environ.get("NOT") and any(fnmatch.fnmatch(case["name"], p) for p in os.environ["NOT"].split(",")): continue
        if not any(fnmatch.fnmatch(case["name"], p) for p in pats): continue
        with tempfile.TemporaryDirectory() as f:
            try:
                told = W[case["run"].dp].run("adv_jobs.check", case=case, folder=f)
            except Exception as e:
                print("!!", case["name"], "CASE FAILED", str(e)[-700:], flush=True); continue
        t = told[0]
        if t["left"] != ["DS"] and t["direct"] == t["left"] and t["left"] == ["direct"]: print("-- same as before", case["name"], t["left"], flush=True); continue
        flag = "  " if not any(x["direct diff"] for x in told) else "DD"
        lf = "" if not any(x["left diff"] for x in told) else "LEFTDIFF"
        print(flag, case["name"], "left", t["left"], "direct", [x["direct"] for x in told], "noise", t["noise"], lf, ("pure error: " + t["pureerr"][:150]) if t["pureerr"] else "", flush=True)
        for r, x in enumerate(told):
            for kind in ("left diff", "direct diff"):
                for k, v in list(x[kind].items())[:8]:
                    if r == 0 or k not in told[0][kind]: print("     ", kind, r, k, str(v[0])[:330], "|||", str(v[1])[:500], flush=True)
    W.close()
if __name__ == "__main__": main()
